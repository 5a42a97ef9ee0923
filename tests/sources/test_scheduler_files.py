"""Files of cgroups and of checkpoint folders."""

from __future__ import annotations

import pytest

from tests.sources.scheduling import attrs, events, signatures

CURRENT = "memory.current 137438953472\nmemory.max     137438953472\n"


class TestCgroup:
    def test_names_before_values(self) -> None:
        found = attrs(
            CURRENT + "memory.stat: anon 21474836480 / file 113816633344 / inactive_file 109521666048\n",
            "cgroup.memory",
        )
        assert found == {
            "current": 137438953472, "max": 137438953472, "anon": 21474836480, "file": 113816633344, "inactive_file": 109521666048
        }  # fmt: skip

    def test_a_file_each(self) -> None:
        text = "==> a/memory.stat <==\ntotal_cache 9\ntotal_rss 7\nother 8\n==> a/memory.limit_in_bytes <==\n11\n"
        assert [e.attrs for e in events(text)] == [{"file": 9, "anon": 7}, {"max": 11}]

    def test_no_limit_is_none(self) -> None:
        assert events("memory.max max\n") == []

    def test_kills_are_an_event_of_their_own(self) -> None:
        text = "low 0\nmax 918\noom 3\noom_kill 3\n"
        assert signatures(text, title="cat x/memory.events") == ["cgroup.memory", "cgroup.oom_kill"]
        assert signatures(text.replace("oom_kill 3", "oom_kill 0"), title="cat x/memory.events") == ["cgroup.memory"]

    def test_what_follows_a_file_is_not_of_it(self) -> None:
        assert attrs("memory.stat:\nanon 5\nprose\nfile 4\n", "cgroup.memory") == {"anon": 5}


class TestCheckpointFolders:
    @pytest.mark.parametrize(
        ("title", "text", "step"),
        [
            ("cat /c/latest_checkpointed_iteration.txt", "4000\n", "4000"),
            ("/c/latest", "global_step900\n", "900"),
        ],
    )
    def test_tracker_files(self, title: str, text: str, step: str) -> None:
        assert attrs(text, "ckpt.tracker", title=title)["step"] == step

    def test_a_tracker_of_a_release_names_no_step(self) -> None:
        assert events("release\n", title="cat /c/latest_checkpointed_iteration.txt") == []

    @pytest.mark.parametrize(
        ("text", "steps"),
        [
            ("global_step_200  global_step_400\n", ["200", "400"]),
            ("iter_0002000\nlatest_checkpointed_iteration.txt\n", ["0002000"]),
            (
                "-rw-r--r-- 1 u g 14990 Feb  2 03:00 epoch_11.pt\ndrwxr-xr-x 2 u g 4096 Feb  2 03:00 checkpoint-500\n",
                ["11", "500"],
            ),
            ("4000/  4500/  notes.txt\n", ["4000", "4500"]),
        ],
    )
    def test_listings(self, text: str, steps: list[str]) -> None:
        assert [e.attrs["step"] for e in events(text, title="ls ckpt")] == steps

    def test_a_listing_is_known_by_its_command(self) -> None:
        assert events("global_step_200\n", title="trainer.log") == []

    def test_the_status_of_a_command(self) -> None:
        assert attrs("0\n", "ckpt.exit_status", title="echo $?")["code"] == 0
