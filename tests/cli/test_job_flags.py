"""Flags for jobs of many nodes, and that flags, configuration and its defaults say the same."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from keepstep.cli.effective import NO_FLAG, SETTINGS, coordinator_config
from keepstep.cli.rdzv_conf import KEYS
from keepstep.cli.run_flags import job_flags
from keepstep.launcher.config import RunConfig
from keepstep.records.errors import ConfigError
from tests.cli.plans import plan

pytestmark = pytest.mark.usefixtures("shell")

TWO = ["--nnodes", "2", "--rdzv-id", "x"]


class TestManyNodes:
    def test_a_range(self) -> None:
        config = plan("--nnodes", "2:4", "--rdzv-id", "x", "--spares", "1", "--replica-size", "2")
        assert (config["min_nodes"], config["nnodes"], config["spares"], config["replica_size"]) == (2, 4, 1, 2)

    @pytest.mark.parametrize(
        ("text", "endpoints"),
        [
            ("a", ["a:29400"]),
            ("a:5", ["a:5"]),
            ("a:5, b,[::1]:7", ["a:5", "b:29400", "[::1]:7"]),
            ("localhost:29500", ["localhost:29500"]),
        ],
    )
    def test_endpoints(self, text: str, endpoints: list[str]) -> None:
        assert plan(*TWO, "--rdzv-endpoint", text)["endpoints"] == endpoints
        # One node needs no coordinator that others can reach, as in torchrun --rdzv-endpoint localhost:0.
        assert plan("--rdzv-endpoint", text)["endpoints"] == []
        assert plan("--spares", "1", "--rdzv-id", "x", "--rdzv-endpoint", text)["endpoints"] == endpoints

    def test_the_static_rendezvous_names_the_host_of_rank_0(self) -> None:
        static = (*TWO, "--master-addr", "n1", "--master-port", "29500", "--node-rank", "1")
        config = plan(*static)
        assert (config["endpoints"], config["master_addr"], config["master_port"]) == (["n1:29400"], "n1", 29500)
        assert plan(*static, "--rdzv-endpoint", "n2")["endpoints"] == ["n2:29400"]
        assert plan(*static, "--rdzv-backend", "c10d")["endpoints"] == []
        assert plan(*TWO, "--master-addr", "127.0.0.1")["endpoints"] == []
        assert plan(*TWO)["endpoints"] == []

    def test_the_default_address_is_nobodys_choice(self) -> None:
        assert plan()["master_addr"] is None

    def test_values_arrive(self, shell: Path) -> None:
        (shell / "t.toml").write_text("")
        config = plan(
            *("--topology", "t.toml", "--token-file", "tok", "--no-tls", "--local-addr", "[::1]", "--log-port", "7"),
            *("--log-prefix", "logs/p", "--out-of-section-timeout", "8", "--checkpoint-iteration-file", "it"),
            *("--max-no-progress-cycles", "0", "--min_progress_iterations", "5", "--no-restart-exit-code", "94"),
            *("--gpu-memory-reclaim-timeout", "0", "--gpu_memory_tolerance_mb", "9", "--gpu-memory-poll-interval", "1"),
            *(
                "--preempt-notice",
                "60",
                "--node-check",
                "0",
                "--attribution-stop",
                "no-restart",
                "--start-timeout",
                "3",
            ),
        )
        expected = {
            "topology": str(shell / "t.toml"),
            "token_file": str(shell / "tok"),
            "tls": False,
            "local_addr": "::1",
            "log_port": 7,
            "log_prefix": str(shell / "logs" / "p"),
            "out_of_section_s": 8.0,
            "checkpoint_iteration_file": str(shell / "it"),
            "max_no_progress_cycles": 0,
            "min_progress_iterations": 5,
            "no_restart_exit_code": 94,
            "gpu_memory_reclaim_timeout_s": 0.0,
            "gpu_memory_tolerance_mb": 9.0,
            "gpu_memory_poll_interval_s": 1.0,
            "preempt_notice_s": 60.0,
            "node_check": 0,
            "stop_on_attribution": "no-restart",
            "start_hang_s": 3.0,
        }
        assert {k: config[k] for k in expected} == expected

    def test_defaults_are_those_of_the_configuration(self) -> None:
        """The flags and RunConfig both have defaults: they must not drift apart."""
        made = {"run_id", "run_dir", "node", "script", "preload", "origins"}
        fields = {
            f.name: list(f.default) if isinstance(f.default, tuple) else f.default
            for f in msgspec.structs.fields(RunConfig)
            if f.default is not msgspec.NODEFAULT and f.name not in made
        }
        assert len(fields) > 30
        config = plan()
        assert {k: config[k] for k in fields} == fields

    def test_every_field_has_a_flag_that_its_origin_is_known_by(self) -> None:
        origins = plan()["origins"]
        for field in set(RunConfig.__struct_fields__) - NO_FLAG:
            assert SETTINGS.get(field, field) in origins, field

    @pytest.mark.parametrize(
        ("text", "lease_s", "join_timeout_s", "last_call_s"),
        [
            ("", 5.0, 600.0, 30.0),
            ("timeout=7", 5.0, 7.0, 30.0),
            ("join_timeout=8,timeout=7,last_call_timeout=1", 5.0, 8.0, 1.0),
            ("keep_alive_interval=2", 6.0, 600.0, 30.0),
            ("keep_alive_interval=2,keep_alive_max_attempt=10", 20.0, 600.0, 30.0),
            ("keep_alive_interval=2,lease=9", 9.0, 600.0, 30.0),
        ],
    )
    def test_rendezvous_settings(self, text: str, lease_s: float, join_timeout_s: float, last_call_s: float) -> None:
        config = plan("--rdzv-conf", text)
        found = (config["lease_s"], config["join_timeout_s"], config["last_call_s"])
        assert found == (lease_s, join_timeout_s, last_call_s)

    def test_the_page_says_what_each_key_does(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "torchrun-flags.md").read_text()
        for key, (kind, meaning) in KEYS.items():
            assert f"| `{key}` | {kind} | {meaning} |" in page


class TestCoordinatorAlone:
    def config(self, *args: str) -> RunConfig:
        seen: list[RunConfig] = []

        @click.command()
        @job_flags
        @click.pass_context
        def coordinator(ctx: click.Context, /, **flags: Any) -> None:
            seen.append(coordinator_config(ctx, flags))

        coordinator.main(list(args), standalone_mode=False)
        return seen[0]

    def test_the_same_flags_mean_the_same(self) -> None:
        flags = [
            *("--nnodes", "2:4", "--rdzv-id", "x", "--spares", "1", "--rdzv-endpoint", "a,b:5", "--no-tls"),
            *("--max-restarts", "3", "--rdzv-conf", "lease=2", "--max-no-progress-cycles", "7", "--replica-size", "2"),
        ]
        alone, launcher = msgspec.structs.asdict(self.config(*flags)), plan(*flags)
        of_the_job = set(alone) - {"script", "mode", "preload", "origins", "node", "signals"}
        assert {k: launcher[k] for k in of_the_job} == {k: alone[k] for k in of_the_job}
        assert (alone["min_nodes"], alone["endpoints"]) == (2, ["a:29400", "b:5"])

    def test_without_an_endpoint_it_is_reached_here(self) -> None:
        assert self.config("--nnodes", "2", "--rdzv-id", "x").endpoints == [f"{socket.gethostname()}:29400"]
        one = self.config("--rdzv-id", "x", "--rdzv-endpoint", "h:1")
        assert one.endpoints == ["h:1"]

    def test_mistakes_are_named(self) -> None:
        with pytest.raises(ConfigError, match="--nnodes 2: give every launcher of the job the same --rdzv-id"):
            self.config("--nnodes", "2")
