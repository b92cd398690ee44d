"""The app of a party."""

from normec.federation.flower.app import client_app

from . import task

app = client_app(task)
