"""Measures, once, what the tests' gates need beyond the oracle's logits, and stores it beside them.

    python gates.py DATA [--trained FOLDER --texts FOLDER]      # needs the oracle and bloomery

For each quantised tiny file of DATA (`<name>.gguf.xz` with `<name>.npz`):

* `<name>-dequantised.npz`, `logits`: llama.cpp on the same weights dequantised to F32 (F32 cache, one batch).
* an entry of `self_kld.json`, KL divergences in nats over the positions as [median, mean]:
  `self`: llama.cpp, one batch against token by token. `order`: two engines of ours that round activations as ggml does
  and differ in the precision of their sums. `activation`: what rounding activations to 8 bits costs, the greatest of
  llama.cpp (batch, token by token) and those two engines against the exact evaluation of the same weights.

For each trained model an entry of `self_kld.json` over the rows kept, and `<name>-trained.npz`, made with an F16 cache
and flash attention off:

* `<text>_tokens` (n, no BOS), `<text>_rows` (indices of rows kept), `<text>_log_probabilities` (float16: near 0, where
  a divergence has its weight, that is exact to 1e-4; logits near 20 would be exact to 1e-2 only).
* `prompt<i>`, `greedy<i>`, `margin<i>`: token ids, 64 greedy tokens, and how far each stood above the second.
* the same for the weights dequantised to F32 with an F32 cache: `<text>_exact_rows`, `<text>_exact_logits` (float32),
  `exact_greedy<i>`, `exact_margin<i>`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import oracle

from bloomery.runtime.architectures import build_program
from bloomery.runtime.divergence import kl_divergence, log_softmax
from bloomery.runtime.executor import StepRows
from bloomery.runtime.model_file import ModelFile
from bloomery.runtime.reference import ReferenceExecutor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from activation_rounding import RoundingExecutor

Logits = np.ndarray[Any, np.dtype[np.float32]]
PROMPTS = ("The history of the", "func (r *Reader) Read", "To configure the server, set the")
TEXTS = ("prose", "code")
KEEP_EVERY, KEEP_EXACT_EVERY, TRAINED_TOKENS, GREEDY = 4, 32, 128, 64


def dequantise_file(source: Path, target: Path) -> None:
    """The same model with every tensor of real numbers as F32."""
    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(target), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), kind, sub)
    writer.add_file_type(0)
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.I32:
            writer.add_tensor(tensor.name, np.ascontiguousarray(tensor.data))
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        shape = [int(n) for n in tensor.shape[::-1]]
        writer.add_tensor(tensor.name, np.ascontiguousarray(values.reshape(shape), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def oracle_logits(path: Path, tokens: list[int], kv: str = "f32", single: bool = False) -> Logits:
    model = oracle.Model(path, kv=kv)
    if single:
        rows = np.concatenate([model.eval([token], pos0=i) for i, token in enumerate(tokens)])
    else:
        rows = model.logits(tokens)
    model.close()
    return rows


def our_logits(
    kind: type[ReferenceExecutor], path: Path, tokens: list[int], wide: bool, cache: Literal["f16", "f32", "f64"]
) -> Logits:
    """All rows in one step, in float64 if `wide`, else in float32."""
    n = len(tokens)
    with ModelFile.open(path) as model:
        executor = kind(
            build_program(model),
            context=n,
            max_rows=n,
            dtype=np.float64 if wide else np.float32,
            cache_type=cache,
        )
        index = np.arange(n, dtype=np.int32)
        step = executor.step(StepRows(np.asarray(tokens, np.int32), np.zeros_like(index), index, index))
        logits = step.logits.copy()
        executor.close()
    return logits


def measure_tiny(data: Path, packed: Path, work: Path) -> dict[str, list[float]]:
    name = packed.name.removesuffix(".gguf.xz")
    path, plain = work / f"{name}.gguf", work / f"{name}-F32.gguf"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    dequantise_file(path, plain)
    stored = np.load(data / f"{name}.npz")
    tokens = stored["tokens"].tolist()
    exact = oracle_logits(plain, tokens)
    np.savez_compressed(data / f"{name}-dequantised.npz", logits=exact)

    single = oracle_logits(path, tokens, single=True)
    narrow = our_logits(RoundingExecutor, path, tokens, False, "f32")
    wide = our_logits(RoundingExecutor, path, tokens, True, "f64")
    path.unlink()
    plain.unlink()
    return _entry(stored["logits"], single, narrow, wide, exact)


def _summary(base: Logits, other: Logits) -> list[float]:
    kl = np.maximum(kl_divergence(base, other), 0.0)
    return [float(f"{value:.3g}") for value in (np.median(kl), kl.mean())]


def measure_trained(path: Path, texts: Path, data: Path, work: Path) -> dict[str, list[float]]:
    stored: dict[str, np.ndarray[Any, Any]] = {}
    model = oracle.Model(path, kv="f16")
    for text in TEXTS:
        source = (texts / f"{text}.txt").read_text(encoding="utf-8")[:4000]
        tokens = model.tokenize(source, add_special=False)[:TRAINED_TOKENS]
        rows = np.arange(KEEP_EVERY - 1, len(tokens), KEEP_EVERY)
        stored[f"{text}_tokens"] = np.asarray(tokens, np.int32)
        stored[f"{text}_rows"] = rows.astype(np.int32)
        stored[f"{text}_log_probabilities"] = log_softmax(model.logits(tokens)[rows]).astype(np.float16)
    for i, prompt in enumerate(PROMPTS):
        stored[f"prompt{i}"] = np.asarray(model.tokenize(prompt, add_special=True), np.int32)
        stored[f"greedy{i}"], stored[f"margin{i}"] = _greedy(model, stored[f"prompt{i}"])
    model.close()

    plain = work / f"{path.stem}-F32.gguf"
    dequantise_file(path, plain)
    runs: dict[str, list[Logits]] = {kind: [] for kind in ("batch", "single", "narrow", "wide", "exact")}
    for text in TEXTS:
        tokens, rows = stored[f"{text}_tokens"].tolist(), stored[f"{text}_rows"]
        exact = oracle_logits(plain, tokens)
        kept = np.arange(KEEP_EXACT_EVERY - 1, len(tokens), KEEP_EXACT_EVERY)
        stored[f"{text}_exact_rows"], stored[f"{text}_exact_logits"] = kept.astype(np.int32), exact[kept]
        runs["exact"].append(exact[rows])
        runs["batch"].append(oracle_logits(path, tokens, "f16")[rows])
        runs["single"].append(oracle_logits(path, tokens, "f16", single=True)[rows])
        runs["narrow"].append(our_logits(RoundingExecutor, path, tokens, False, "f16")[rows])
        runs["wide"].append(our_logits(RoundingExecutor, path, tokens, True, "f16")[rows])
    model = oracle.Model(plain, kv="f32")
    for i in range(len(PROMPTS)):
        stored[f"exact_greedy{i}"], stored[f"exact_margin{i}"] = _greedy(model, stored[f"prompt{i}"])
    model.close()
    plain.unlink()
    np.savez_compressed(data / f"{path.stem}-trained.npz", **stored)
    return _entry(**{kind: np.concatenate(rows) for kind, rows in runs.items()})


def _greedy(model: oracle.Model, prompt: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    tokens, rows = model.greedy(prompt.tolist(), GREEDY)
    top = np.sort(rows, axis=1)[:, -2:]
    return np.asarray(tokens, np.int32), (top[:, 1] - top[:, 0]).astype(np.float32)


def _entry(batch: Logits, single: Logits, narrow: Logits, wide: Logits, exact: Logits) -> dict[str, list[float]]:
    activation = np.max([_summary(exact, x) for x in (batch, single, narrow, wide)], axis=0)
    return {"self": _summary(batch, single), "order": _summary(wide, narrow), "activation": activation.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--trained", type=Path, help="folder with the trained tiny-*.gguf files")
    parser.add_argument("--texts", type=Path, help="folder with prose.txt and code.txt")
    arguments = parser.parse_args()
    entries = {}
    with tempfile.TemporaryDirectory() as work:
        for packed in sorted(arguments.data.glob("*.gguf.xz")):
            name = packed.name.removesuffix(".gguf.xz")
            entries[name] = measure_tiny(arguments.data, packed, Path(work))
            print(name, entries[name], flush=True)
        if arguments.trained:
            for path in sorted(arguments.trained.glob("tiny-*.gguf")):
                if not path.name.startswith("tiny-deepseek41"):
                    entries[path.stem] = measure_trained(path, arguments.texts, arguments.data, Path(work))
                    print(path.stem, entries[path.stem], flush=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    (arguments.data / "self_kld.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
