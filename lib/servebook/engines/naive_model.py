"""A plain decoder: Transformers, batch size 1, greedy, with a KV cache that is copied as it grows every step.

It is also the decoding process of naive_server.py (`python -m servebook.engines.naive_model --model DIR`). Decoding has
a process of its own because HTTP in the same process competes for the interpreter lock, 7–10 % of a small model's time
per token.

Input lines: {"prompt": [ids], "max_tokens": N, "eos": [ids]}, or "stop" to end the current request. Output lines: the
facts as JSON after loading; then for each request its token ids, each as soon as it is known, and "end", or "error
TEXT".
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import sys
from collections.abc import Iterator
from typing import Any


class NaiveModel:
    """Loads a model and generates with it. torch and Transformers are imported here, not with the module.

    device: "auto", "cpu" or "cuda"; dummy: random weights from config.json alone.
    """

    def __init__(
        self, path: str, *, dummy: bool = False, device: str = "auto", dtype: str = "bfloat16",
        revision: str | None = None, trust_remote_code: bool = False,
    ) -> None:  # fmt: skip
        import torch
        import transformers

        self._torch = torch
        self.device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("CUDA was requested, but torch finds no GPU it can use")
        if self.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        torch.manual_seed(0)
        kind: Any = getattr(torch, dtype)
        source = {"revision": revision, "trust_remote_code": trust_remote_code}
        config = transformers.AutoConfig.from_pretrained(path, **source)
        auto: Any = transformers.AutoModelForCausalLM
        if dummy:
            with torch.device(self.device):
                model = auto.from_config(config, dtype=kind, trust_remote_code=trust_remote_code)
        else:
            model = auto.from_pretrained(path, dtype=kind, **source).to(self.device)
        self.model = model.eval()
        text = config.get_text_config()
        self.vocab = int(text.vocab_size)
        self.context = int(text.max_position_embeddings)
        self.eos = _ids(getattr(model.generation_config, "eos_token_id", None) or config.eos_token_id)
        self.facts = {
            "version": f"transformers {transformers.__version__}",
            "attention_backend": getattr(config, "_attn_implementation", None),
            "max_model_len": self.context,
            "weights_gib": round(sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30, 3),
            "prefix_caching": False, "chunked_prefill": False, "async_scheduling": False, "cuda_graphs": False,
            "max_num_seqs": 1, "dtype": dtype,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "threads": torch.get_num_threads() if self.device == "cpu" else None,
        }  # fmt: skip

    def generate(self, prompt: list[int], max_tokens: int) -> Iterator[int]:
        """Greedy tokens for a prompt of token ids, each yielded when the host has it."""
        torch = self._torch
        from transformers import DynamicCache

        with torch.inference_mode():
            cache = DynamicCache(config=self.model.config)
            ids = torch.tensor([prompt], device=self.device)
            for _ in range(max_tokens):
                logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                chosen = logits[:, -1].argmax(-1, keepdim=True)
                token = int(chosen)  # waits for the device: a token counts when the host has it
                yield token
                ids = chosen


def _ids(eos: int | list[int] | None) -> frozenset[int]:
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def use_cores(*, decoding: bool) -> None:
    """Bind this process to all cores but the last, which is left to HTTP and the load client.

    The vLLM engine leaves one core free, too. Without binding, the system wakes the token's reader on the core that
    wrote it, ahead of the next step.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        import psutil

        for thread in psutil.Process().threads():  # including threads that a library has already started
            os.sched_setaffinity(thread.id, cores[:-1] if decoding else cores[-1:])


def main() -> int:
    """The program: load the model, report the facts, serve requests until stdin closes; 1 if the model cannot be
    loaded."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args()
    # libraries print to stdout, so tokens use a descriptor of their own
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        model = NaiveModel(
            options.model, dummy=options.dummy, device=options.device, dtype=options.dtype,
            revision=options.revision, trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
        for _ in model.generate([0, 0], 2):  # first-call costs belong to the start, not to the first request
            pass
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if model.device == "cpu":
        use_cores(decoding=True)
    facts = {**model.facts, "vocab": model.vocab, "eos": sorted(model.eos)}
    os.write(out, json.dumps(facts).encode() + b"\n")
    gc.collect()
    gc.freeze()
    work(model, 0, out)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line options of the model, shared with naive_server."""
    parser.add_argument("--model", required=True, help="a model folder or Hub id")
    parser.add_argument("--dummy", action="store_true", help="random weights; only config.json is read")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--revision")
    parser.add_argument("--trust-remote-code", action="store_true")


def work(model: NaiveModel, requests: int, out: int) -> None:
    """Serve requests from one descriptor to another until it closes."""
    pending = select.poll()
    pending.register(requests, select.POLLIN)
    lines = os.fdopen(requests, "rb", buffering=0)
    while line := lines.readline():
        if line.strip() == b"stop":  # for a request that has just ended
            continue
        request = json.loads(line)
        eos = frozenset(request["eos"])
        last = b"end\n"
        try:
            for token in model.generate(request["prompt"], request["max_tokens"]):
                os.write(out, b"%d\n" % token)
                if token in eos or pending.poll(0):
                    break
        except Exception as error:
            last = f"error {type(error).__name__}: {' '.join(str(error).split())[:300]}\n".encode()
        os.write(out, last)


if __name__ == "__main__":
    sys.exit(main())
