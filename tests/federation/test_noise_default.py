"""A federation that names no noise gets secure noise, whichever way it is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normec import NormEC, Privacy
from normec.experiments import build
from normec.federation.flower.scaffold import write_app
from normec.federation.flower.settings import app_config, read
from normec.federation.local.federation import permissive_policy
from normec.federation.protocol.coordinator import Coordinator

from .in_process import plan


@pytest.mark.parametrize("trust", ["local", "central"])
def test_a_statement_without_a_kind_of_noise(trust: Any) -> None:
    privacy = Privacy(sigma=1.0, trust=trust, memory="noisy" if trust == "local" else "clean")
    server = Coordinator(NormEC(0.1, 0.5), torch.zeros(3), ["a", "b"], plan(3), run="noise", privacy=privacy)
    assert {request.privacy.noise for request in server.requests().values()} == {"secure"}
    assert server.mechanism is not None
    assert server.mechanism.privacy.noise == "secure"
    server.close()


@pytest.mark.parametrize("given", [{}, {"noise": ""}, {"trust": "central"}, {"sigma": 1.0, "epsilon": ""}])
def test_settings_without_a_kind_of_noise(given: dict[str, Any]) -> None:
    settings = read(given)
    privacy = build.privacy(settings.run)
    assert privacy is not None
    assert privacy.noise == "secure"
    assert permissive_policy(settings)["simulation"] is False


def test_the_app_that_init_writes(tmp_path: Any) -> None:
    write_app(tmp_path / "app")
    settings = read(app_config(tmp_path / "app"))
    assert settings.run.noise == "secure"
    assert permissive_policy(settings)["simulation"] is False


def test_seeded_noise_is_for_those_who_ask_for_it() -> None:
    assert permissive_policy(read({"noise": "seeded"}))["simulation"] is True
    assert permissive_policy(read({"private": False}))["simulation"] is False  # without noise there is none to seed
