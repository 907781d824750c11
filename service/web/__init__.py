"""The web page: static files that speak to the API from the browser, and the routes that serve them.

There is no build step: `static/` holds the modules as the browser runs them. `app.js` shows the list of jobs, one
job or the editor of a new one by the address; everything that comes from the API is shown as text, never as markup.
"""

from service.web.pages import router

__all__ = ["router"]
