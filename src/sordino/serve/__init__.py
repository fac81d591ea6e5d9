"""A small local page that lists runs, follows them and shows their budgets."""

from sordino.serve.server import Server

__all__ = ["Server"]
