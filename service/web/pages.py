"""Routes of the web page: one document for all of its URLs, and the files that it consists of."""

from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).parent / "static"
_FILES = StaticFiles(directory=_FOLDER)

# By suffix, since mimetypes differs between machines, and browsers refuse modules of any other type.
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

_UNCHANGED_UNTIL_ASKED = "no-cache"  # cached, but revalidated by its ETag, so that an upgrade shows at once
_FOR_EVER = "public, max-age=31536000, immutable"  # the folder's name contains the version


@router.get("/")
@router.get("/compare")
@router.get("/new")
@router.get("/sweeps")
@router.get("/sweeps/{name}")
@router.get("/jobs/{job_id}")
async def page() -> FileResponse:
    """Return the page. Its script reads the URL to decide what to show."""
    return FileResponse(_FOLDER / "index.html", headers={"Cache-Control": _UNCHANGED_UNTIL_ASKED})


@router.get("/static/{path:path}")
async def static(path: str, request: Request) -> Response:
    """Return a file of the page; 304 if the browser already has it."""
    response = await _FILES.get_response(path, request.scope)
    response.headers["Cache-Control"] = _FOR_EVER if path.startswith("vendor/") else _UNCHANGED_UNTIL_ASKED
    media_type = _TYPES.get(Path(path).suffix)
    if media_type and "content-type" in response.headers:
        response.headers["Content-Type"] = f"{media_type}; charset=utf-8"
    return response
