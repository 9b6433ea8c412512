"""The experiment file as pydantic models; every key of the format is here and nowhere else.

Types are strict (a quoted number is not a number) and unknown keys are errors. Cross-field rules that need
only the file stand here; names of models, GPUs and policies are checked by those who own them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Section(BaseModel):
    """A mapping in the file: strict types, no unknown keys, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _tag(*names: str) -> Discriminator:
    """Tell the forms of a value apart: a mapping by the key it holds, anything else as "plain"."""

    def choose(value: Any) -> str:
        if isinstance(value, dict):
            return next((name for name in names if name in value), names[0])
        if isinstance(value, BaseModel):
            return next((name for name in names if hasattr(value, name)), names[0])
        return "plain"

    return Discriminator(choose)


class Lognormal(Section):
    """Lognormal token counts, rounded and held to [min, max]."""

    median: Positive
    sigma: NonNegative
    min: Count | None = None
    max: Count | None = None


class LognormalLengths(Section):
    lognormal: Lognormal


class UniformLengths(Section):
    uniform: Annotated[list[Count], Field(min_length=2, max_length=2)]

    @model_validator(mode="after")
    def _ordered(self) -> UniformLengths:
        if self.uniform[0] > self.uniform[1]:
            raise ValueError(f"uniform: [{self.uniform[0]}, {self.uniform[1]}] must be [smallest, largest]")
        return self


class QuantileLengths(Section):
    quantiles: str


Lengths = Annotated[
    Annotated[Count, Tag("plain")]
    | Annotated[LognormalLengths, Tag("lognormal")]
    | Annotated[UniformLengths, Tag("uniform")]
    | Annotated[QuantileLengths, Tag("quantiles")],
    _tag("lognormal", "uniform", "quantiles"),
]


class Factor(Section):
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]


SloShares = Annotated[
    Annotated[str, Tag("plain")] | Annotated[dict[str, NonNegative], Tag("shares")],
    Discriminator(lambda v: "shares" if isinstance(v, dict) else "plain"),
]

MaxNewTokens = Annotated[
    Annotated[Literal["actual"], Tag("word")]
    | Annotated[Count, Tag("plain")]
    | Annotated[Factor, Tag("factor")],
    Discriminator(lambda v: "word" if isinstance(v, str) else "plain" if isinstance(v, int) else "factor"),
]


class WorkloadSpec(Section):
    """What arrives: a trace (a path or a bundled name) or generated requests.

    Which keys go together is checked by `sim.workload`, which builds the requests from them.
    """

    trace: str | None = None
    format: str | None = None
    time_unit: str | None = None
    columns: dict[str, str] | None = None
    on_zero: Literal["drop", "clamp"] | None = None
    window_s: Annotated[list[NonNegative], Field(min_length=2, max_length=2)] | None = None
    max_requests: Count | None = None
    subsample: Positive | None = None
    shuffle: bool | None = None
    spread_s: Positive | None = None
    rescale: Literal["stretch", "redraw"] = "stretch"
    num_prompts: Count | None = None
    prompt_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    spearman: Annotated[float, Field(gt=-1, lt=1, allow_inf_nan=False)] | None = None
    arrivals: Literal["trace", "poisson", "gamma", "deterministic", "bursts", "closed-loop"] | None = None
    burstiness: Positive | None = None
    on_s: Positive | None = None
    off_s: NonNegative | None = None
    minute_profile: str | None = None
    max_concurrency: Count | None = None
    on_overlength: Literal["reject", "truncate"] = "reject"
    max_new_tokens: MaxNewTokens = "actual"
    slo_class: SloShares | None = None

    @property
    def closed_loop(self) -> bool:
        """Are requests issued as others finish, rather than at times of their own?"""
        return self.arrivals == "closed-loop"


class ModelEntry(Section):
    """A model by name or config.json, and how it is run: quantised, with experts that are not all as popular."""

    name: Annotated[str, Field(min_length=1)]
    quantization: Literal["fp8"] | None = None
    routing_skew: NonNegative | None = None


class Parallel(Section):
    tp: Count = 1
    pp: Count = 1
    ep: Count = 1
    dp: Count = 1


class PolicyEntry(BaseModel):
    """A policy by name, `module:Class` or preset, with its knobs; the policy itself checks the knobs."""

    model_config = ConfigDict(extra="allow", strict=True)
    name: Annotated[str, Field(min_length=1)]
    label: Annotated[str, Field(min_length=1)] | None = None

    @property
    def title(self) -> str:
        return self.label or self.name

    def plain(self) -> str | dict[str, Any]:
        """The entry as it would be written: a bare name when there is nothing else to say."""
        entry = {k: v for k, v in self.model_dump().items() if v is not None}
        return self.name if list(entry) == ["name"] else entry


def _policy(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Policies = Annotated[
    list[Annotated[PolicyEntry, BeforeValidator(_policy, json_schema_input_type=str | PolicyEntry)]],
    BeforeValidator(_as_list),
    Field(min_length=1),
]


class Sweep(Section):
    request_rate: Annotated[list[Positive], BeforeValidator(_as_list), Field(min_length=1)]
    per_gpu: bool = Field(
        False, description="Rates are per GPU: a policy that uses two GPUs is offered twice the rate."
    )

    @model_validator(mode="after")
    def _distinct(self) -> Sweep:
        if len(set(self.request_rate)) < len(self.request_rate):
            raise ValueError("`request_rate` lists a rate twice")
        return self


class SloTargets(Section):
    """Per-request limits; a request is good when it meets every one that is given."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    itl_ms: Positive | None = None
    e2el_ms: Positive | None = None
    ttft_ms_per_token: Positive | None = None


class SloClass(SloTargets):
    priority: int = Field(
        0,
        ge=-(2**15),
        lt=2**15,
        description="Lower is more urgent, for policies that order by priority; a trace's own priority column wins.",
    )


class Slo(SloTargets):
    attainment: Fraction = 0.99
    classes: dict[str, SloClass] | None = None

    @model_validator(mode="after")
    def _named(self) -> Slo:
        if self.classes == {}:
            raise ValueError(
                "`classes` names no class; leave it out, or give one such as {chat: {ttft_ms: 300}}"
            )
        return self


class Kernels(Section):
    attention: Literal["serial", "streams", "hfuse", "batched", "pod"] = "serial"
    launch: Literal["graph", "eager"] = "graph"
    scale: dict[str, Positive] = {}


class Noise(Section):
    """Of the logarithm of a belief's factor: beyond 5, a factor of 148, a policy could only wait for ever."""

    sigma: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)]
    bias: Annotated[float, Field(ge=-5, le=5, allow_inf_nan=False)] = 0.0


class NoisyEstimator(Section):
    noisy: Noise


class AnalyticTerms(Section):
    wave_term: bool = False
    attention_term: bool = False


class AnalyticEstimator(Section):
    analytic: AnalyticTerms


Estimator = Annotated[
    Annotated[Literal["oracle", "analytic"], Tag("plain")]
    | Annotated[NoisyEstimator, Tag("noisy")]
    | Annotated[AnalyticEstimator, Tag("analytic")],
    _tag("noisy", "analytic"),
]


class Memory(Section):
    gpu_memory_utilization: Fraction | None = None
    num_gpu_blocks: Count | None = None
    block_size: Count | None = None
    prefix_caching: bool = False


class Pool(Section):
    """Replicas of one role; what is not given is the experiment's own."""

    count: Count = 1
    gpu: str | None = None
    profile: str | None = None
    tp: Count | None = None
    power_cap_w: Positive | None = None


class Pools(Section):
    prefill: Pool = Pool()
    decode: Pool = Pool()
    mixed: Pool | None = None


class Link(Section):
    """Within one machine as the profile measured it; with a bandwidth or a latency modelled. What is left out is that
    of the GPU table, the overlap that of the policy."""

    kind: Literal["auto", "nvlink", "network"] = "auto"
    bandwidth_gb_s: Positive | None = None
    latency_us: NonNegative | None = None
    sharing: Literal["fair", "fifo"] = "fair"
    overlap: Literal["layer", "none"] | None = None


class Measure(Section):
    warmup_s: NonNegative = 0.0
    drain: bool = True
    horizon_s: Positive | None = None
    request_rows: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _order(self) -> Measure:
        if self.horizon_s is not None and self.horizon_s <= self.warmup_s:
            raise ValueError("`horizon_s` must lie after `warmup_s`")
        return self


class Experiment(Section):
    """One experiment: policies x request rates x replicates on one model, GPU and workload."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1)] = "experiment"
    workload: WorkloadSpec
    model: Annotated[
        Annotated[str, Tag("plain")] | Annotated[ModelEntry, Tag("entry")],
        Discriminator(lambda v: "entry" if isinstance(v, dict | ModelEntry) else "plain"),
    ]
    gpu: str
    profile: str = "auto"
    parallel: Parallel = Parallel()
    replicas: Count = 1
    router: str = "round-robin"
    policies: Policies
    sweep: Sweep | None = None
    slo: Slo = Slo()
    kernels: Kernels = Kernels()
    estimator: Estimator = "analytic"
    mechanism: Literal["green", "libsmctrl", "mps"] = "green"
    contention: bool = True
    memory: Memory = Memory()
    pools: Pools | None = None
    link: Link | None = None
    power_cap_w: Positive | None = None
    measure: Measure = Measure()
    jitter: bool = True
    strict: bool = False
    # tables hold seeds as 64-bit integers, and replicates count on from this one
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    num_runs: Count = 1
    resolved: dict[str, Any] | None = Field(
        None, description="Written by simctl into a result folder: versions and content hashes; not an input."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        titles = [entry.title for entry in self.policies]
        twice = next((t for t in titles if titles.count(t) > 1), None)
        if twice is not None:
            raise ValueError(f"policies: two entries are called '{twice}'; give each its own `label`")
        if self.workload.closed_loop and self.sweep is not None:
            raise ValueError("sweep.request_rate does not fit `arrivals: closed-loop`, which has no rate")
        if self.workload.trace is None and not self.workload.closed_loop and self.sweep is None:
            raise ValueError("workload: generated requests need a rate: add `sweep: {request_rate: [...]}`")
        return self

    def model_entry(self) -> ModelEntry:
        """The model as a mapping, whether it was given as one or by its name."""
        return ModelEntry(name=self.model) if isinstance(self.model, str) else self.model

    def belief(self) -> Any:
        """The estimator as the engine takes it: a name, or a plain mapping."""
        return self.estimator if isinstance(self.estimator, str) else self.estimator.model_dump()

    def rates(self) -> list[float | None]:
        """Offered rates in requests/s; [None] for a trace at its own stamps or a closed loop."""
        return list(self.sweep.request_rate) if self.sweep else [None]
