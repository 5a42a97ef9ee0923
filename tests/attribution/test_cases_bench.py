"""What bench/cases.py rests on: bytes of cases however they are written down, intervals, calibration by leaving one out."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCH = Path(__file__).resolve().parents[2] / "bench"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


encodings = loaded("_encodings")
calibration = loaded("_calibration")


class TestEncodings:
    @pytest.mark.parametrize(
        ("text", "encoding", "data"),
        [
            ("grün", "utf-8", "grün".encode()),
            ("grün", "", "grün".encode()),
            ("grün", "latin-1", b"gr\xfcn"),
            ("ab", "utf-16", "ab".encode("utf-16")),
            ("a\udcffb", "utf-8", b"a\xffb"),
            ("a\\xffb\\e[0m\\n\\\\", "utf-8+escaped", b"a\xffb\x1b[0m\n\\"),
            ("\\u2588|\\x00", "escaped", "█".encode() + b"|\0"),
            ("a\\n\\u00e9", "utf-16-le (escaped)", "a\né".encode("utf-16-le")),
            ("a\nb", "utf-8, crlf", b"a\r\nb"),
            (base64.b64encode(b"\x1f\x8b\0").decode(), "base64", b"\x1f\x8b\0"),
            ("00 ff\n1f", "hex", b"\0\xff\x1f"),
        ],
    )
    def test_a_text_becomes_the_bytes_that_it_stands_for(self, text: str, encoding: str, data: bytes) -> None:
        assert encodings.encoded(text, encoding) == data

    def test_packed_bytes_stay_packed_for_the_reader(self) -> None:
        packed = gzip.compress(b"hello")
        assert encodings.encoded(base64.b64encode(packed).decode(), "base64+gzip") == packed
        assert gzip.decompress(encodings.encoded("hello", "gzip")) == b"hello"

    @pytest.mark.parametrize("encoding", ["rot13", "utf-9", "base64+lzma"])
    def test_an_encoding_that_is_not_known_is_named(self, encoding: str) -> None:
        with pytest.raises(ValueError, match=encoding.rpartition("+")[2]):
            encodings.encoded("x", encoding)

    @pytest.mark.parametrize("encoding", ["base64", "hex"])
    def test_a_text_that_is_not_what_it_says_is_refused(self, encoding: str) -> None:
        with pytest.raises(ValueError, match=encoding):
            encodings.encoded("§§", encoding)

    @given(st.binary(max_size=60))
    def test_any_bytes_can_be_spelled(self, data: bytes) -> None:
        spelled = "".join(f"\\x{byte:02x}" for byte in data)
        assert encodings.encoded(spelled, "escaped") == data
        assert encodings.encoded(base64.b64encode(data).decode(), "base64") == data


class TestIntervals:
    def test_wilson_against_published_values(self) -> None:
        # Newcombe 1998, table I: 15 of 148 gives 0.0624 to 0.1605.
        low, high = calibration.wilson(15, 148)
        assert (round(low, 4), round(high, 4)) == (0.0624, 0.1605)

    def test_a_share_of_all_is_not_certain(self) -> None:
        low, high = calibration.wilson(9, 9)
        assert low < 0.75 and high == 1.0

    def test_the_bootstrap_holds_the_mean(self) -> None:
        values = np.random.default_rng(1).normal(1.0, 0.5, 200)
        low, high = calibration.bootstrap(values, 0)
        assert low < values.mean() < high and high - low < 0.2


class TestCalibration:
    def test_sums_that_are_twice_too_large_get_their_temperature(self) -> None:
        generator = np.random.default_rng(0)
        honest = generator.normal(0, 1.5, (600, 3))
        chances = np.exp(honest) / np.exp(honest).sum(axis=1, keepdims=True)
        truth = [int(generator.choice(3, p=row)) for row in chances]
        fit = calibration.leave_one_out(2.0 * honest, truth, 2)
        assert 1.6 < fit.temperature < 2.5 and abs(fit.bias) < 0.5

    def test_a_case_does_not_help_its_own_fit(self) -> None:
        # All others say "never class 1"; the one that is class 1 gets its probability from them.
        sums = np.zeros((20, 2))
        truth = [0] * 19 + [1]
        fit = calibration.leave_one_out(sums, truth, 1)
        assert fit.chances[19, 1] < 0.2

    def test_scores_of_a_perfect_and_a_useless_forecast(self) -> None:
        perfect, useless = np.eye(3), np.full((3, 3), 1 / 3)
        assert calibration.brier(perfect, [0, 1, 2]).mean() == pytest.approx(0.0)
        assert calibration.brier(useless, [0, 1, 2]).mean() == pytest.approx(2 / 3)
        assert calibration.log_loss(useless, [0, 1, 2]).mean() == pytest.approx(np.log(3))

    def test_every_verdict_is_in_one_bin(self) -> None:
        confidences = [0.0, 0.5, 0.6999, 0.7, 0.95, 1.0]
        bins = calibration.binned(confidences, [True] * 6)
        assert sum(b.size for b in bins) == 6

    def test_the_diagram_is_well_formed(self) -> None:
        from xml.etree import ElementTree

        bins = calibration.binned([0.3, 0.6, 0.97], [False, True, True])
        root = ElementTree.fromstring(calibration.diagram(bins, "R"))
        assert sum(1 for e in root.iter() if e.tag.endswith("circle")) == len(bins)
