"""A party's end."""

from normec.federation.app import client_app

from . import task

app = client_app(task)
