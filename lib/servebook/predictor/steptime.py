"""Time of a forward pass, from few constants: each is a fraction of a datasheet figure or a time, with physical bounds.

    t = h + max(W/BW, F/R) + ω·min(W/BW, F/R) + prefill_attention/R_a + decode_attention

h: host_s plus host_per_sequence_s per request; W: weight bytes read; F: FLOPs of the linear layers and the LM head;
ω: overlap_loss. BW, BW_kv, R and R_a are the datasheet's figures times bandwidth_share, kv_share, matmul_share and
attention_share. decode_attention is K/BW_kv (K: KV bytes read) in a pure decode step, and max(K/BW_kv, mixed_rows · its
FLOPs / R_a) in a mixed step: FlashAttention-2 splits the KV and packs the query heads of a group only when the longest
query is one token, so in a mixed step each decode token occupies a query tile of mixed_rows rows.

That is the GPU's time. The host adds two conditions. A step cannot start before the host has prepared it (prepare_s:
scheduling, inputs, replaying a graph). It cannot end before the host has launched it: layers × layer_launch_s if it
launches kernels one by one; piecewise_share of that if CUDA graphs replay all except the attention (a step with
prefill, up to the largest captured size); nothing if one graph replays the whole step (decode-only). The host's work
overlaps with the step before. A launch-bound step's tokens are fetched only after the next step has been prepared.
Continuous prefill reaches the board's power cap (capped_loss). Found on the H200 run of 2026-11-29 (outputs/reference),
from its 128- and 1,024-token prompts, the gaps between events around every mixed step, and its NVML
series. One module, since both servers share a base class.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from .attention import AttentionTimes, kv_bytes_per_s
from .experts import WeightTimes
from .parallel import ALONE, Layout
from .power import DECODE_FROM, DECODE_FULL, draw, throttled
from .scheduler import Step

# share of the front end's time per prompt token that is spent after the engine's first token: on the H200 run of
# 2026-11-29 the first event of a 16,384-token prompt was 13 ms late and the second token followed at once
FIRST_EVENT_SHARE = 0.6
# share of the front end's fixed time per request that takes the API server's core; the rest is hand-over between tasks
# and processes, which overlaps. On an H200 the first token of 128 requests sent at once came after 0.128 s: with 1.5 µs
# a prompt token, 0.1 of 4 ms gives 0.114 s. Bounds: 0.05 to 0.2
FRONTEND_BUSY_SHARE = 0.1
# seconds of the API server's core for a request, and for each of its prompt tokens, besides its events and the front
# end: in all a request takes 1.4 ms and 2.8 µs a token (prompts as token ids), from the CPU time of the server's main
# thread on an H200's host with vLLM 0.26 at 82 and 315 requests/s of 2 output tokens (bounds: 0.5 to 2 ms, 0 to 2 µs).
# It is spent after the first token: requests that end together, four in each step of 5.9 ms, delayed nothing
LATER_S, LATER_TOKEN_S = 0.0010, 1.3e-6
# share of the host's time per step during which the GPU is idle with synchronous scheduling; the rest overlaps with the
# GPU's work. On an H200 with vLLM 0.26, engine without a server: a 0.5B model's steps take 2.35 ms of
# the host's time, and Llama-3.1-8B's are 1.66 ms longer without asynchronous scheduling
EXPOSED_SHARE = 0.7
# factor on the launch time of a step if the engine was idle before: 22 to 25 ms for a single prompt of 640 or 1,024
# tokens, 16 to 22 ms with decodes running, on the same two runs
IDLE_LAUNCH = 1.2


# the constants that depend on the host's single-core speed (not host_s, which is mostly GPU time)
OF_THE_HOST = (
    "layer_launch_s", "prepare_s", "engine_sequence_s", "host_per_sequence_s", "expert_launch_s", "replica_sync_s",
    "frontend_request_s", "frontend_token_s", "frontend_event_s",
)  # fmt: skip


def on_this_host(constants: Mapping[str, float]) -> dict[str, float]:
    """The constants, with the host's times scaled by host_slowness."""
    slowness = constants.get("host_slowness", 1.0)
    return {n: v * slowness if n in OF_THE_HOST else v for n, v in constants.items()}


class _Model:
    """Times common to both servers. shape: the share of one GPU."""

    def __init__(self, shape: ModelShape, gpu: Gpu, constants: Mapping[str, float], expert_ranks: int = 1) -> None:
        c = constants
        self.shape, self.constants = shape, dict(constants)
        self.weights = WeightTimes(shape, gpu, constants, expert_ranks)
        self.weights_s = self.weights.dense_s
        self.sample_s = self.weights.sample_s
        # decode attention per context token: reading KV, or on a CPU multiplying it
        self.attention = AttentionTimes(
            shape,
            kv_bytes_per_s(shape, gpu, c.get("kv_share", c["bandwidth_share"])),
            gpu.flops_per_s(shape.dtype) * c["attention_share"],
            c.get("decode_rows", 0.0),
            c.get("mixed_rows", 0.0),
        )
        self.kv_token_s, self.pair_s = self.attention.kv_token_s, self.attention.pair_s
        self.decode_token_s = self.attention.decode_token_s
        self.host_s = c["host_s"]
        self.frontend_request_s, self.frontend_token_s = c["frontend_request_s"], c["frontend_token_s"]

    def first_event(self, prompt_tokens: int) -> float:
        return 0.0

    def frontend(self, prompt_tokens: int) -> float:
        return self.frontend_request_s + self.frontend_token_s * prompt_tokens

    def prefill_attention(self, before: int, new: int) -> float:
        return self.attention.prefill_s(before, new)


class VllmTimes(_Model):
    """Step times of vLLM for given constants (see priors). Implements simulation.StepTimes.

    shape: the whole model. layout: its parallelism; a step passes through all pipeline stages. captured_tokens: largest
    step with captured CUDA graphs; 0: no graphs (eager mode).
    """

    def __init__(
        self,
        shape: ModelShape,
        gpu: Gpu,
        constants: Mapping[str, float],
        layout: Layout = ALONE,
        captured_tokens: int = 512,
        asynchronous: bool = True,
        gathers_prompts: bool = False,
    ) -> None:
        constants = on_this_host(constants)
        super().__init__(layout.rank(shape), gpu, constants, layout.data if shape.experts else 1)
        self.captured_tokens = captured_tokens
        self.replicas = layout.data if shape.experts else 1  # replicas that share experts step together
        if self.replicas > 1:
            self.host_s += constants.get("replica_sync_s", 0.0)
        self._layout, self._whole, self._gpu = layout, shape, gpu
        self.linked = layout.communicates(shape)
        self.overlap = layout.pipeline  # chunks of one prompt in the pipeline at once, if it is alone
        self.launch_s = shape.layers * constants.get("layer_launch_s", 0.0)  # 0 on a CPU, which launches nothing ahead
        self.piecewise_s = self.launch_s * constants.get("piecewise_share", 1.0)
        if shape.experts:  # not in piecewise_s: captured graphs contain the experts' kernels
            self.launch_s += shape.experts.layers * constants.get("expert_launch_s", 0.0)
        self.asynchronous, self.gathers_prompts = asynchronous, gathers_prompts
        # 0 on a CPU, where preparing a step overlaps with nothing and is part of host_s
        self.prepare_s = constants.get("prepare_s", 0.0) * (1.0 if asynchronous else EXPOSED_SHARE)
        self.engine_sequence_s = constants.get("engine_sequence_s", 0.0)
        self.sequence_s = constants["host_per_sequence_s"]
        self.decode_loss = constants.get("decode_capped_loss", 0.0)
        self.capped_loss = constants.get("capped_loss", 0.0)
        self.event_s = constants.get("frontend_event_s", 0.0)
        slowness = constants.get("host_slowness", 1.0) if self.event_s else 0.0  # on a CPU all is part of host_s
        self.later_s, self.later_token_s = slowness * LATER_S, slowness * LATER_TOKEN_S
        self.mixed_token_s = self.attention.mixed_token_s
        self._decode: dict[int, float] = {}

    def frontend(self, prompt_tokens: int) -> float:
        """Seconds before the request reaches the engine."""
        return super().frontend(prompt_tokens) - self.first_event(prompt_tokens)

    def frontend_busy(self, prompt_tokens: int) -> float:
        """Seconds of frontend() that take the API server's core."""
        return self.frontend(prompt_tokens) - (1 - FRONTEND_BUSY_SHARE) * self.frontend_request_s

    def later_busy(self, prompt_tokens: int) -> float:
        """Seconds of the API server's core for a request after its first token, besides its events."""
        return self.later_s + self.later_token_s * prompt_tokens

    def first_event(self, prompt_tokens: int) -> float:
        """Delay of the first token's event in seconds. It lengthens TTFT and shortens TPOT."""
        return FIRST_EVENT_SHARE * self.frontend_token_s * prompt_tokens

    def decode(self, decodes: int, kv_tokens: float) -> tuple[float, float]:
        """(a, b): a decode-only step of `decodes` sequences takes a + b · kv_tokens seconds."""
        found = self._decode.get(decodes)
        if found is None:
            fixed = self.host_s + decodes * self.sequence_s + self.weights.step_s(decodes, decodes)
            found = self._decode[decodes] = fixed + self.links(decodes, decodes)
        fixed, slope = self.attention.decode_line(decodes, kv_tokens)
        fixed += found
        if self.decode_loss:
            drawn = self.decode_draw(decodes, kv_tokens, fixed + slope * kv_tokens)
            slower = 1 + self.decode_loss * throttled(drawn, DECODE_FROM, DECODE_FULL)
            fixed, slope = fixed * slower, slope * slower
        floor = self._decode_floor(decodes)
        return (floor, 0.0) if floor > fixed + slope * kv_tokens else (fixed, slope)

    def _decode_floor(self, decodes: int) -> float:
        """Host seconds for a decode-only step: replaying one graph, or launching every kernel."""
        launch = self.launch_s if decodes > self.captured_tokens else 0.0
        return launch + self.prepare(decodes) if self.asynchronous else launch

    def prepare(self, requests: int) -> float:
        """Host seconds before a step with `requests` requests can start."""
        return self.prepare_s + requests * self.engine_sequence_s

    def links(self, tokens: int, samples: int) -> float:
        """Seconds of communication between GPUs in a step."""
        if not self.linked:
            return 0.0
        return self._layout.exchange_s(self._whole, self._gpu, tokens, samples, self.constants.get("link_share"))

    def launch(self, tokens: int, idle: bool = False) -> float:
        """Host seconds to launch a step with prefill and `tokens` tokens; the step cannot end sooner. idle: no step was
        running before."""
        seconds = self.piecewise_s if tokens <= self.captured_tokens else self.launch_s
        return seconds * (IDLE_LAUNCH if idle else 1.0)

    def decode_draw(self, decodes: int, kv_tokens: float, seconds: float) -> float:
        """Board power of a decode-only step, as a share of its cap."""
        read = self.weights.read_s(decodes) + self.attention.read_s(decodes, kv_tokens)
        compute = self.weights.multiply_s(decodes, decodes)
        return draw(read, compute, 0.0, seconds)

    def slowdown(self, drawn: float) -> float:
        """Factor on the time of a step with prefill. drawn: recent mean power, as a share of the cap."""
        return 1 + self.capped_loss * throttled(drawn)

    def mixed(self, step: Step) -> tuple[float, float]:
        """(seconds, board power as a share of its cap) of a step that prefills and may decode, without throttling."""
        tokens, samples, attention = step.decodes, step.decodes, 0.0
        for _, new, before, last in step.chunks:
            tokens += new
            samples += last
            attention += self.prefill_attention(before, new)
        compute = self.weights.multiply_s(tokens, samples)
        host = self.host_s + (step.decodes + len(step.chunks)) * self.sequence_s
        decoding = self.attention.decodes_s(step.decodes, step.kv_tokens, mixed=True)
        weights = self.weights.step_s(tokens, samples, self._met(step.decodes, tokens))
        seconds = host + weights + attention + decoding + self.links(tokens, samples)
        seconds += self._others(seconds, tokens, step.decodes, step.kv_tokens)
        if not samples:
            seconds /= self.overlap  # the next chunk starts when this one leaves the first pipeline stage
        read = self.weights.read_s(tokens) + self.attention.read_s(step.decodes, step.kv_tokens)
        return seconds, draw(read, compute, attention, seconds)

    def _met(self, decodes: int, tokens: int) -> int:
        """Tokens routed to the experts in a step: this replica's, and the decodes of the other replicas."""
        return tokens + (self.replicas - 1) * decodes

    def _others(self, seconds: float, tokens: int, decodes: int, kv_tokens: float) -> float:
        """Seconds that this replica waits for the other replicas' prefills. Each is assumed to prefill the same amount
        in separate steps, which delay the decodes here as this step delays theirs."""
        if self.replicas == 1:
            return 0.0
        fixed, slope = self.decode(decodes, kv_tokens) if decodes else (0.0, 0.0)
        return (self.replicas - 1) * max(0.0, max(seconds, self.launch(tokens)) - fixed - slope * kv_tokens)

    def parts(self, decodes: int, kv_tokens: float, chunks: list[tuple[int, int, bool]]) -> dict[str, float]:
        """A step's seconds by cause. chunks: (new tokens, tokens before, whether it samples a token).

        weights: reading them. compute: GEMMs of the decodes that the weight reads do not hide. prefill: GEMMs and
        attention of the chunks. kv_reads: KV reads of the decodes. mixed_attention: additional time of the decodes'
        attention in a step with prefill. host: see host_s. launch: waiting for the host. The parts sum to the time of a
        decode-only step. With chunks they exclude the host's launch, since only the simulation knows how much of it
        overlaps with the step before, and the power cap.
        """
        host = self.host_s + (decodes + len(chunks)) * self.sequence_s
        experts = self.weights.experts_s(decodes * self.replicas)
        alone = self.weights.step_s(decodes, decodes) if decodes else self.weights_s
        new = sum(c[0] for c in chunks)
        samples = decodes + sum(c[2] for c in chunks)
        whole = self.weights.step_s(decodes + new, samples, self._met(decodes, decodes + new))
        attention = sum(self.prefill_attention(c[1], c[0]) for c in chunks)
        decoding = self.attention.decodes_s(decodes, kv_tokens)
        states = decodes * (self.attention.state_s + self.attention.state_token_s)
        parts = {
            "weights": self.weights_s,
            "compute": alone - self.weights_s - experts,
            "kv_reads": decoding - states,
            "mixed_attention": self.attention.decodes_s(decodes, kv_tokens, mixed=bool(chunks)) - decoding,
            "prefill": whole - alone + attention if chunks else 0.0,
            "host": host,
        }
        if experts:
            parts["experts"] = experts
        if states:
            parts["states"] = states
        if self.linked:
            parts["links"] = self.links(decodes + new, samples)
        if chunks and self.replicas > 1:
            parts["replicas"] = self._others(sum(parts.values()), decodes + new, decodes, kv_tokens)
        if not chunks:
            if self.decode_loss:
                gpu = sum(parts.values())
                drawn = self.decode_draw(decodes, kv_tokens, gpu)
                parts["power_cap"] = gpu * self.decode_loss * throttled(drawn, DECODE_FROM, DECODE_FULL)
            parts["launch"] = max(0.0, self._decode_floor(decodes) - sum(parts.values()))
        return parts

    def first_token(self, prompt_tokens: int, budget: int) -> float:
        """Seconds from the first scheduled step to the first token, at C = 1."""
        return self._first_token(prompt_tokens, budget)[0]

    def _first_token(self, prompt_tokens: int, budget: int) -> tuple[float, bool]:
        """(seconds, whether they are launch-bound). The first decode step is launched before the first token is
        fetched. If the GPU is slower than the host, the host runs ahead of it."""
        gpu, host, before = 0.0, 0.0, 0
        while before < prompt_tokens:
            new = min(budget, prompt_tokens - before)
            last = before + new == prompt_tokens
            host += self.prepare(1)
            gpu = max(gpu, host)
            chunk = self.host_s + self.sequence_s + self.weights.step_s(new, last, new)
            chunk += self.prefill_attention(before, new)
            gpu += (chunk + self.links(new, last)) / (1 if last else self.overlap)
            host += self.launch(new, idle=not before)
            gpu = max(gpu, host)
            before += new
        host += self.prepare(1) if self.asynchronous else 0.0
        return max(gpu, host), host >= gpu

    def launch_bound(self, prompt_tokens: int, budget: int) -> tuple[bool, bool]:
        """(whether TTFT is bound by the host's launches, whether TPOT is) at C = 1."""
        a, b = self.decode(1, prompt_tokens)
        floor = self._decode_floor(1)
        return self._first_token(prompt_tokens, budget)[1], floor > 0 and a + b * prompt_tokens < 1.001 * floor

    def per_token(self, prompt_tokens: int, output_tokens: int) -> float:
        """TPOT at C = 1 in seconds, as a client measures it."""
        context = prompt_tokens + output_tokens / 2
        a, b = self.decode(1, context)
        steps = (a + b * context + (0.0 if self.asynchronous else self.prepare(1))) * max(output_tokens - 1, 1)
        return max(steps - self.first_event(prompt_tokens), 0.1 * steps) / max(output_tokens - 1, 1)


class NaiveTimes(_Model):
    """Times of the naive server for given constants (see priors): batch 1, eager, KV cache copied for every token."""

    def __init__(self, shape: ModelShape, gpu: Gpu, constants: Mapping[str, float]) -> None:
        super().__init__(shape, gpu, constants)
        self.launch_s = constants["layer_launch_s"] * shape.layers
        self.recopy = constants["kv_recopy"]
        self.serial = gpu.is_cpu

    def _with_launches(self, work_s: float) -> float:
        return self.launch_s + work_s if self.serial else max(self.launch_s, work_s)

    def prefill(self, prompt_tokens: int) -> float:
        work = self.weights.step_s(prompt_tokens, 1) + self.prefill_attention(0, prompt_tokens)
        return self.host_s + self._with_launches(work)

    def per_token(self, prompt_tokens: int, output_tokens: int) -> float:
        """TPOT in seconds: host, launches, weights, attention, and copying the KV cache."""
        return sum(self.parts(prompt_tokens, output_tokens).values())

    def launch_bound(self, prompt_tokens: int, budget: int = 0) -> tuple[bool, bool]:
        """See VllmTimes."""
        if self.serial:
            return False, False
        bound = self.host_s + self.launch_s
        return self.prefill(prompt_tokens) <= 1.001 * bound, self.per_token(prompt_tokens, 2) <= 1.001 * bound

    def decode_total(self, prompt_tokens: int, output_tokens: int) -> float:
        return (output_tokens - 1) * self.per_token(prompt_tokens, output_tokens)

    def parts(self, prompt_tokens: int, output_tokens: int) -> dict[str, float]:
        """TPOT in seconds by cause."""
        context = prompt_tokens + output_tokens / 2
        linear = self.weights.step_s(1, 1)
        kv = self.attention.decodes_s(1, context)
        copies = (self.recopy - 1) * (self.attention.read_s(1, context) - self.attention.state_s)
        work = linear + kv + copies
        experts = self.weights.experts_s(1)
        parts = {
            "weights": self.weights_s,
            "compute": linear - self.weights_s - experts,
            "kv_reads": kv,
            "kv_recopy": copies,
            "host": self.host_s + self._with_launches(work) - work,
        }
        return parts | ({"experts": experts} if experts else {})
