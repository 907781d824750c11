"""Middleware that every request passes on its way to a route and back."""
