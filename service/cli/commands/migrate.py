"""``boost migrate``: migrate the database before a service starts."""

from service.cli.failures import BadInput, Failed, read_settings
from service.cli.output.printing import say


def migrate() -> None:
    """Migrate the database at BOOST_DATABASE_URL to this version. `boost serve` also does this when it starts."""
    # Imported here because few commands need SQL.
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    from service.jobs.database import migrate as bring_up_to_date
    from service.jobs.database_errors import in_words

    settings = read_settings()
    try:
        place = make_url(settings.database_url).render_as_string(hide_password=True)
        bring_up_to_date(settings.database_url)
    except ArgumentError as error:
        raise BadInput(f"BOOST_DATABASE_URL: {error}") from error
    except (OSError, SQLAlchemyError) as error:
        raise Failed(f"the database {place} could not be migrated: {in_words(error)}") from error
    say(f"the database {place} is up to date")
