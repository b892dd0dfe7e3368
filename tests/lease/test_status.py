"""``kvt status`` against a live control plane, with and without a cluster secret."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvtransport.errors import ConfigError, HandshakeTimeoutError
from kvtransport.lease.control import ControlPlane
from kvtransport.lease.identity import EngineIdentity
from kvtransport.lease.ledger import Ledger, LedgerSettings
from kvtransport.lease.security import ClusterSecret
from kvtransport.lease.settings import ControlSettings
from kvtransport.lease.status import StatusClient
from kvtransport.policy.retention import load_retention

SECRET = ClusterSecret(b"a secret of enough bytes")


@pytest.fixture
def control(request):
    ledger = Ledger(
        load_retention("budgeted"), LedgerSettings(cache_blocks=100, block_tokens=(16,))
    )
    plane = ControlPlane(
        ControlSettings(secret=getattr(request, "param", None)), EngineIdentity("engine-a"), ledger
    )
    plane.add_status("recompute", lambda: {"policy": "threshold"})
    plane.start()
    yield plane
    plane.close()


def test_status_is_what_the_control_plane_says(control):
    with StatusClient(control.address, None) as client:
        for _ in range(2):
            status = client.fetch(5)
            assert status["engine_id"] == "engine-a"
            assert status["ledger"]["budget_blocks"] == 50
            assert status["recompute"] == {"policy": "threshold"}


@pytest.mark.parametrize("control", [SECRET], indirect=True)
@pytest.mark.parametrize("wrong", [None, ClusterSecret(b"another secret, as long")])
def test_another_secret_learns_nothing(control, wrong):
    with StatusClient(control.address, SECRET) as client:
        assert client.fetch(5)["encrypted"] is True
    with StatusClient(control.address, wrong) as client, pytest.raises(HandshakeTimeoutError):
        client.fetch(0.7)


def test_nobody_there_is_said_in_time():
    with (
        StatusClient("tcp://127.0.0.1:1", None) as client,
        pytest.raises(HandshakeTimeoutError, match=r"127\.0\.0\.1:1"),
    ):
        client.fetch(0.3)
    with pytest.raises(ConfigError, match="ADDRESS"):
        StatusClient("127.0.0.1:5601", None)


def test_command_prints_a_page_and_json(control):
    command = [
        sys.executable,
        "-c",
        "from kvtransport.cli import main; main()",
        "status",
        control.address,
    ]
    page = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert "engine-a" in page
    assert "ledger" in page
    out = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=30, check=True
    )
    assert json.loads(out.stdout)["engine_id"] == "engine-a"
