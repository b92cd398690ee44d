"""The app of the server."""

from normec.federation.flower.app import server_app

from . import task

app = server_app(task)
