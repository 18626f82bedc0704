"""Models of a hub: chosen by quant type, fetched with resume, checked, and found again without a connection."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import program
from hub_stand import HubStand, hub_stand

from bloomery.launcher.demo_model import demo_model_path
from bloomery.launcher.hub_files import Wanted, chosen_files, models_of, quant_of
from bloomery.runtime.errors import BloomeryError

NAMES = [
    "README.md",
    "imatrix.gguf",
    "mmproj-F16.gguf",
    "Qwen3-30B-A3B-Q4_K_M.gguf",
    "Qwen3-30B-A3B-UD-Q4_K_XL.gguf",
    "Qwen3-30B-A3B-IQ4_XS.gguf",
    "BF16/Qwen3-30B-A3B-BF16-00001-of-00002.gguf",
    "BF16/Qwen3-30B-A3B-BF16-00002-of-00002.gguf",
    "Q8_0/Qwen3-30B-A3B-Q8_0-00001-of-00002.gguf",
]
DATA = random.Random(5).randbytes(3 << 20)
BLOCK = 10 << 20
MODEL = "maker/tiny-GGUF"


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("a-Q4_K_M.gguf", "Q4_K_M"),
        ("a.q8_0.gguf", "Q8_0"),
        ("a-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("a-mxfp4.gguf", "MXFP4"),
        ("b/a-BF16-00001-of-00003.gguf", "BF16"),
        ("Q5_K_S/model.gguf", "Q5_K_S"),
        ("Qwen2.5-7B.gguf", ""),
    ],
)
def test_the_quant_type_of_a_name(name: str, quant: str) -> None:
    assert quant_of(name) == quant


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        ("u/m", ["Qwen3-30B-A3B-Q4_K_M.gguf"]),
        ("u/m:iq4_xs", ["Qwen3-30B-A3B-IQ4_XS.gguf"]),
        ("u/m:UD-Q4_K_XL", ["Qwen3-30B-A3B-UD-Q4_K_XL.gguf"]),
        ("u/m:BF16", NAMES[6:8]),
        ("u/m:latest", ["Qwen3-30B-A3B-Q4_K_M.gguf"]),
    ],
)
def test_the_files_that_are_meant(wanted: str, files: list[str]) -> None:
    assert chosen_files(Wanted.parse(wanted), NAMES) == files


def test_without_the_default_type_the_first_model_is_taken() -> None:
    assert chosen_files(Wanted.parse("u/m"), ["b-Q2_K.gguf", "a-Q8_0.gguf", "mmproj.gguf"]) == ["a-Q8_0.gguf"]
    assert models_of(NAMES)[0] == NAMES[6]


@pytest.mark.parametrize(
    ("wanted", "file", "message"),
    [
        ("u/m:Q2_K", "", "it has BF16, IQ4_XS, Q4_K_M, Q8_0, UD-Q4_K_XL"),
        ("u/m", "other.gguf", "no file other.gguf"),
        ("u/m:Q8_0", "", "lacks the shard Q8_0/Qwen3-30B-A3B-Q8_0-00002-of-00002.gguf"),
        ("m", "", "USER/MODEL:QUANT"),
        ("../m", "", "USER/MODEL:QUANT"),
        ("u/m/x", "", "USER/MODEL:QUANT"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(wanted: str, file: str, message: str) -> None:
    with pytest.raises(BloomeryError) as caught:
        chosen_files(Wanted.parse(wanted, file), NAMES)
    assert message in str(caught.value)


@pytest.fixture
def hub() -> Iterator[HubStand]:
    pytest.importorskip("huggingface_hub", reason="the extra bloomery[hf] is not installed")
    files = {f"{MODEL}/{name}": b"GGUF" + DATA for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")}
    files[f"{MODEL}/tiny-F16-00001-of-00002.gguf"], files[f"{MODEL}/tiny-F16-00002-of-00002.gguf"] = b"one", b"two"
    with hub_stand(files) as running:
        yield running


def fetch(
    hub: HubStand, home: Path, *arguments: str, run: str = "tokenize", **environment: str
) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, since huggingface_hub reads its environment once. It fails after the download,
    for the data is no model; what it says then names the file."""
    own = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_TOKEN": "", "HF_HUB_DISABLE_XET": "1", **environment}
    command = program(run, *arguments)
    environ = {**os.environ, **own}
    return subprocess.run(command, input="x", capture_output=True, text=True, timeout=60, env=environ)


def blobs(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("blobs/*") if not path.name.endswith(".lock"))


def test_a_model_is_fetched_once_and_found_offline(hub: HubStand, tmp_path: Path) -> None:
    data = Path(demo_model_path("tiny")).read_bytes()
    hub.files[f"{MODEL}/tiny-Q4_K_M.gguf"] = data
    first = fetch(hub, tmp_path, "--hf", MODEL)
    assert first.returncode == 0, first.stderr
    assert hub.sent == len(data)
    (blob,) = blobs(tmp_path)
    assert blob.name == hashlib.sha256(data).hexdigest() and blob.read_bytes() == data
    for arguments, environment, said in (
        (("-hf", f"{MODEL}:q4_k_m"), {}, ""),
        (("--hf-repo", MODEL, "--hf-file", "tiny-Q4_K_M.gguf"), {"HF_HUB_OFFLINE": "1"}, ""),
        (("--hf", MODEL, "--offline"), {}, ""),
        (("--hf", MODEL), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "comes from the cache"),
    ):
        again = fetch(hub, tmp_path, *arguments, **environment)
        assert again.returncode == 0 and again.stdout == first.stdout, again.stderr
        assert said in again.stderr and bool(said) == bool(again.stderr)
    assert hub.sent == len(data), "nothing was transferred twice"


def test_a_transfer_that_broke_off_goes_on_where_it_ended(hub: HubStand, tmp_path: Path) -> None:
    data = hub.files[f"{MODEL}/tiny-Q4_K_M.gguf"] = b"GGUF" + DATA * 8
    hub.cut, hub.cuts = 11 << 20, 2
    fetch(hub, tmp_path, "--hf", MODEL)
    assert [blob.read_bytes() for blob in blobs(tmp_path)] == [data]
    assert hub.ranges == [f"bytes={BLOCK}-", f"bytes={2 * BLOCK}-"], "whole blocks of huggingface_hub are kept"


def test_a_hub_that_goes_away_leaves_what_the_next_program_goes_on_from(hub: HubStand, tmp_path: Path) -> None:
    data = hub.files[f"{MODEL}/tiny-Q4_K_M.gguf"] = b"GGUF" + DATA * 8
    hub.cut, hub.cuts = 11 << 20, 1
    hub.silent = True
    broken = fetch(hub, tmp_path, "--hf", MODEL)
    assert broken.returncode == 1 and "the transfer broke off after 10 MiB" in broken.stderr, broken.stderr
    assert "start again" in broken.stderr and "Traceback" not in broken.stderr
    hub.silent, hub.ranges = False, []
    fetch(hub, tmp_path, "--hf", MODEL)
    assert [blob.read_bytes() for blob in blobs(tmp_path)] == [data] and hub.ranges == [f"bytes={BLOCK}-"]


def test_a_killed_program_leaves_what_the_next_one_goes_on_from(hub: HubStand, tmp_path: Path) -> None:
    data = hub.files[f"{MODEL}/tiny-Q4_K_M.gguf"]
    folder = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{hashlib.sha256(data).hexdigest()}.bloomery.part").write_bytes(data[:2_000_000])
    fetch(hub, tmp_path, "--hf", MODEL)
    assert hub.ranges == ["bytes=2000000-"] and hub.sent == len(data) - 2_000_000
    assert [blob.read_bytes() for blob in blobs(tmp_path)] == [data]


def test_a_draft_model_comes_the_same_way(hub: HubStand, tmp_path: Path) -> None:
    """What a killed program left is gone on from, checked, and found again without a connection; damage is refused."""
    data = hub.files["maker/draft-GGUF/draft-Q4_K_M.gguf"] = Path(demo_model_path("tiny-qwen3moe")).read_bytes()
    folder = tmp_path / "hub" / "models--maker--draft-GGUF" / "blobs"
    folder.mkdir(parents=True)
    part = folder / f"{hashlib.sha256(data).hexdigest()}.bloomery.part"
    part.write_bytes(data[:1_000_000])
    drafted = ("--demo", "tiny-qwen3moe", "--threads", "1", "--ctx", "64", "--prompt", "Once", "-n", "8")
    hub.damage = True
    refused = fetch(hub, tmp_path, *drafted, "-hfd", "maker/draft-GGUF", run="generate")
    assert refused.returncode == 1 and "arrived damaged: its checksum is" in refused.stderr, refused.stderr
    hub.damage, hub.ranges, hub.sent = False, [], 0
    part.write_bytes(data[:1_000_000])
    first = fetch(hub, tmp_path, *drafted, "-hfd", "maker/draft-GGUF", run="generate")
    assert first.returncode == 0, first.stderr
    assert hub.ranges == ["bytes=1000000-"] and hub.sent == len(data) - 1_000_000
    assert [blob.read_bytes() for blob in blobs(tmp_path)] == [data]
    for arguments in (("--spec-draft-hf", "maker/draft-GGUF:q4_k_m"), ("--hf-repo-draft", "maker/draft-GGUF")):
        again = fetch(hub, tmp_path, *drafted, *arguments, "--offline", run="generate")
        assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert hub.sent == len(data) - 1_000_000, "nothing was transferred twice"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-hfd", "nothing"), "--hf-repo-draft 'nothing' names no repository"),
        (("-hfd", MODEL, "-md", "x.gguf"), "--model-draft and --hf-repo-draft both name a draft model"),
        (("-hfd", f"{MODEL}:Q3_K_S"), "no quant type Q3_K_S -> it has F16, Q4_K_M, Q8_0"),
        (("-hfd", MODEL, "--offline"), "is not in the cache"),
        (("-hfd", MODEL, "--endpoint", "ipc:///x"), "--hf-repo-draft has no effect on the daemon"),
    ],
)
def test_draft_models_that_cannot_be_had(
    hub: HubStand, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    answer = fetch(hub, tmp_path, "--prompt", "x", *arguments, run="generate")
    assert answer.returncode in (1, 2) and message in answer.stderr and " -> " in answer.stderr, answer.stderr
    assert answer.stderr.count("\n") == 1


def test_damaged_data_is_refused_and_fetched_anew(hub: HubStand, tmp_path: Path) -> None:
    hub.damage = True
    refused = fetch(hub, tmp_path, "--hf", MODEL)
    assert refused.returncode == 1 and "arrived damaged: its checksum is" in refused.stderr
    assert blobs(tmp_path) == [] and not list(tmp_path.rglob("snapshots/*/*.gguf"))
    hub.damage = False
    fetch(hub, tmp_path, "--hf", MODEL)
    assert len(blobs(tmp_path)) == 1


def test_all_shards_come(hub: HubStand, tmp_path: Path) -> None:
    answer = fetch(hub, tmp_path, "--hf", f"{MODEL}:F16")
    assert "tiny-F16-00001-of-00002.gguf" in answer.stderr  # too short for a model
    assert {path.name for path in tmp_path.rglob("snapshots/*/*")} == {
        "tiny-F16-00001-of-00002.gguf",
        "tiny-F16-00002-of-00002.gguf",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hf", "maker/other"), "has no repository maker/other"),
        (("--hf", f"{MODEL}:Q3_K_S"), "no quant type Q3_K_S -> it has F16, Q4_K_M, Q8_0"),
        (("--hf", MODEL, "--hf-file", "x.gguf"), "has no file x.gguf"),
        (("--hf", MODEL, "--offline"), "is not in the cache"),
        (("--hf", MODEL, "-m", "x.gguf"), "-m and --hf both name a model"),
        (("--hf-file", "x.gguf"), "--hf-file needs --hf"),
        (("--hf", "nothing"), "names no repository"),
    ],
)
def test_errors_are_one_line_with_a_next_step(
    hub: HubStand, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    answer = fetch(hub, tmp_path, *arguments)
    assert answer.returncode in (1, 2) and message in answer.stderr and " -> " in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_a_private_repository_needs_the_token(hub: HubStand, tmp_path: Path) -> None:
    hub.token = "secret"
    assert "HF_TOKEN" in fetch(hub, tmp_path, "--hf", MODEL).stderr
    for arguments, environment in (((), {"HF_TOKEN": "secret"}), (("--hf-token", "secret"), {})):
        fetch(hub, tmp_path, "--hf", MODEL, *arguments, **environment)
        assert len(blobs(tmp_path)) == 1
    assert hub.sent and not hub.strangers, "the token goes to the hub only"
