"""The web page: static files that call the API from the browser, and the routes that serve them.

There is no build step: `static/` has the modules as the browser runs them. `app.js` shows the list of jobs, a job,
several beside each other, or the editor of a new one, depending on the URL; everything from the API is shown as text,
never as markup.
"""
