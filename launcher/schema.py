"""Every option we own: its type, one sentence and its unit. Defaults live in conf/, never here.

`launcher.compose` fills these classes from Hydra's config; everything else reads them.
Must never hold a default, a derived value, or a DeepSpeed key (those are raw under `deepspeed`).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any


@dataclass
class RunSection:
    name: str | None
    """Name of the run's folder under `root`; null: made from model, stage, offload and the time."""
    dir: str | None
    """The run's folder; null: `root`/`name`. Must not hold a run already."""
    root: str
    """Folder in which runs get their own folder."""
    source: str | None
    """Folder from which model.target, data.target and recipe.target are imported; null: from what is installed."""
    steps: int
    """Optimizer steps of the whole run (a resumed run counts the steps done before)."""
    seed: int
    """Seed of weights, data order and dropout."""


@dataclass
class TrainSection:
    micro_batch_size: int | str | None
    """Samples per forward pass and rank; auto: the largest power of two that fits."""
    gradient_accumulation_steps: int | None
    """Forward/backward passes per optimizer step and rank."""
    global_batch_size: int | None
    """Samples per optimizer step over all ranks = micro x accumulation x world size."""
    fallback_micro_batch_size: int
    """Samples per forward pass and rank when fewer than two of the three above are given."""
    sequence_length: int
    """Tokens per sample."""
    objectives: dict[str, float]
    """Weights of the losses that a module of your own returns by name: {ctr: 1.0, dwell: 0.3}; empty: its one loss."""


@dataclass
class EvalSection:
    every: int
    """Optimizer steps between evaluations; 0: only at the end."""
    samples: int
    """Held-out samples per evaluation (fewer when the validation split is smaller); 0: none."""
    generate: int
    """Held-out conversations whose prompts are answered at each evaluation, in generations.jsonl; 0: none."""
    max_new_tokens: int
    """Longest of those answers, in tokens."""
    patience: int
    """Evaluations in a row that are no better than the best one, after which the run ends; 0: it never does."""
    min_delta: float
    """By how much a loss must be below the best one to be better, in the loss's own unit."""


@dataclass
class EmaSection:
    decay: float | None
    """What an exponential moving average of the weights keeps of itself at each step (0.999); null: none is kept."""


@dataclass
class ModelSection:
    name: str
    """Label shown in plans and run names."""
    target: str | None
    """MODULE.NAME of your own torch module, of which `config` are the keyword arguments; null: a Hugging Face model."""
    path: str | None
    """Local Hugging Face folder (or config.json) whose configuration is used."""
    init_from: str | None
    """Weights to begin with: a Hugging Face folder (safetensors), or a run or checkpoint; null: drawn from run.seed."""
    config: dict[str, Any]
    """Hugging Face configuration fields (with `path`, those that replace the file's); of a `target`, its arguments."""
    attn_implementation: str | None
    """Attention kernel: sdpa, eager, flash_attention_2; null: the library's choice."""
    leaf_modules: list[str]
    """Classes of modules of which ranks may use different parts, beside mixtures of experts, which are found."""


@dataclass
class ParametersSection:
    groups: list[dict[str, Any]]
    """Groups, the first that fits takes a parameter: [{match: [NAME*], max_dim: 1, weight_decay: 0, lr_scale: 0.1}]."""
    frozen: list[str]
    """Patterns of the names of parameters that are not trained."""
    norms: dict[str, list[str]]
    """Parts whose gradient norm is recorded at every step, by names of parameters: {ctr: ['ctr_head.*']}."""


@dataclass
class PeftSection:
    kind: str
    """none (every parameter is trained that is not frozen) or lora."""
    rank: int | None
    """Rank of the two matrices beside each adapted layer."""
    alpha: int | None
    """Their product counts alpha / rank times."""
    dropout: float | None
    """Probability with which an input of the adapter is dropped in training."""
    target: list[str]
    """Ends of the names of the linear layers that are adapted; [all-linear]: all but the output layer."""
    modules_to_save: list[str]
    """Ends of the names of modules that are trained whole, and saved with the adapter."""


@dataclass
class ActivationSection:
    checkpointing: bool | str
    """Recompute activations of each layer in backward instead of keeping them; auto: where it is needed to fit."""


@dataclass
class ClusterSection:
    kind: str
    """Where hosts come from: local, hostfile or slurm."""
    num_procs: int | None
    """Processes on this host (kind local); null: one per GPU, or 2 on CPU."""
    accelerator: str
    """auto, cuda or cpu; auto: cuda when this host has an NVIDIA GPU."""
    hostfile: str | None
    """File with one `HOST slots=N` line per host."""
    include: str | None
    """Hosts and slots to use, `HOST[:s,s]@HOST`, in DeepSpeed's notation."""
    exclude: str | None
    """Hosts and slots to leave out, same notation."""
    master_addr: str | None
    """Address of the first host as the others reach it; null: resolved from its name."""
    master_port: int | None
    """Rendezvous port; null: a free one."""
    launcher: str
    """DeepSpeed's runner for several hosts: pdsh, openmpi, mpich or slurm."""
    launcher_args: str | None
    """Extra arguments for that runner."""
    ssh_port: int | None
    """SSH port of the hosts; null: ssh's own default."""
    env: dict[str, str]
    """Environment variables set on every worker."""
    preflight: bool
    """Look at every host before a launch on several (mode=check does it for any cluster)."""
    restarts: int
    """Times a run is started again from its newest good checkpoint after a rank or a host is lost."""


@dataclass
class HardwareSection:
    name: str
    """Label shown beside estimated times."""
    file: str | None
    """JSON object of the options below, as measured on this hardware; what it holds goes before them."""
    memory_bytes: int | None
    """Memory of a device, in bytes."""
    bf16_flops_per_s: float | None
    """Dense 16-bit operations a second of a device, at their peak."""
    fp32_flops_per_s: float | None
    """The same in fp32, without TF32."""
    memory_bytes_per_s: float | None
    """Bytes a second of a device's own memory."""
    node_bytes_per_s: float | None
    """Bytes a second that a device sends to the others of its host."""
    network_bytes_per_s: float | None
    """Bytes a second that a host sends to other hosts, all its adapters together."""
    pcie_bytes_per_s: float | None
    """Bytes a second between a device and its host, each way."""
    host_memory_bytes_per_s: float | None
    """Bytes a second of a host's memory, all sockets together."""
    disk_bytes_per_s: float | None
    """Bytes a second of a host's NVMe for offloaded state."""
    context_bytes: int | None
    """Bytes of a GPU that a process takes beside torch's own, for CUDA and NCCL; null: 800 MB are assumed."""
    fragmentation: float | None
    """Share of a GPU's memory that torch's allocator cannot hand out, 0 to 1; null: a tenth is assumed."""
    utilisation: float | None
    """Share of its peak operations a second that a device reaches, 0 to 1; null: a half is assumed."""


@dataclass
class LaunchSection:
    submit: str
    """none: start it from here; sbatch: write a batch script and hand it to Slurm (with cluster=slurm)."""
    nodes: int | None
    """Nodes of the batch job."""
    slots: int | None
    """Processes on each node of the batch job: its GPUs, on CUDA."""
    sbatch: list[str]
    """Further options of sbatch: ['--partition=gpu','--time=24:00:00']."""


@dataclass
class CheckSection:
    format: str
    """text or json: how `mode=check` prints."""
    timeout_s: float
    """Seconds a host may take to answer the preflight."""
    collective: bool
    """Let `mode=check` measure a short collective over all ranks once every host has passed."""


@dataclass
class WatchSection:
    stall_s: float
    """Seconds without progress after which all stacks are dumped and the run ends; thrice that before step 1."""
    grace_s: float
    """Seconds that a stop by signal may take to write its checkpoint before the run is killed."""
    slow_factor: float
    """Step time over that of the run's first steps from which every host is measured and the slow one named."""


@dataclass
class AuditSection:
    mode: str
    """At stage 3, what becomes of misused partitioned parameters: off, warn (reported) or strict (the run ends)."""
    steps: int
    """Optimizer steps that are watched, from the model's construction on; nothing is afterwards."""
    path: str | None
    """File or folder of Python sources that mode=audit reads; null in the other modes."""
    format: str
    """text or json: how `mode=audit` prints."""


@dataclass
class CheckpointSection:
    every: int
    """Optimizer steps between checkpoints; 0: only at the end."""
    keep: int
    """Newest checkpoints kept; 0: all."""
    background: bool
    """Copy a checkpoint to host memory, kept for the next, and write it while training goes on (checkpoint.async)."""
    keep_every: int
    """Checkpoints of steps that this divides are kept for good; 0: none."""
    best: bool
    """Also save whenever an evaluation is better than all before it, and keep that checkpoint."""


@dataclass
class TrackerSection:
    kind: str
    """none or wandb."""
    project: str | None
    """W&B project."""
    entity: str | None
    """W&B team or user; null: the account's default."""
    group: str | None
    """W&B group that ties runs together."""
    tags: list[str]
    """W&B tags."""
    timeout_s: float
    """Seconds the tracker may take to start before training goes on without it."""


@dataclass
class ExportSection:
    dtype: str
    """fp32, bf16 or fp16: element type of the written weights."""
    dir: str | None
    """Target folder; null: `export` in the run's folder."""
    step: int | None
    """Checkpoint to export, by optimizer step; null: the newest good one."""
    best: bool
    """Export the checkpoint of the best evaluation."""
    weights: str
    """trained, or ema: the moving average that a run with ema.decay keeps of them."""
    lora: str
    """Of a run with peft=lora: merged (the weights with the adapter in them) or adapter (it alone, for PEFT)."""
    max_shard_bytes: int
    """Largest safetensors file, in bytes."""
    source: str | None
    """Checkpoint folder that no run of ours wrote (DeepSpeed's or a Trainer's), instead of run.dir."""
    verify: bool
    """Read every tensor back, and the model where the checkpoint records a loss, before the folder gets its name."""


@dataclass
class PlanSection:
    format: str
    """text or json: how `mode=plan` prints."""
    compare: bool
    """Have mode=plan judge every stage x offload x activation checkpointing for this model and cluster."""
    scale: list[int]
    """Numbers of ranks for which mode=plan judges the same configuration: 8,16,32,64."""
    html: str | None
    """File into which mode=plan writes what it shows, as one page; null: none."""
    force: bool
    """Start a run whose planned peak does not fit."""
    memory_bytes: int | None
    """Bytes of memory of a rank's device; null: those of hardware=..., else this machine's if all ranks are on it."""


@dataclass
class RecipeSection:
    name: str
    """The job: pretrain, finetune, profile, custom, resume or export."""
    target: str | None
    """MODULE.NAME of your own recipe, a function of a plan and its run folder; with recipe=custom."""


@dataclass
class RunConfig:
    mode: str
    """train (start it), plan (print it), check (look at every host), explain (`key`) or audit (read sources)."""
    key: str | None
    """What mode=explain explains: an option, a group or a DeepSpeed key; null in the other modes."""
    recipe: RecipeSection
    run: RunSection
    train: TrainSection
    eval: EvalSection
    ema: EmaSection
    model: ModelSection
    parameters: ParametersSection
    peft: PeftSection
    activation: ActivationSection
    data: dict[str, Any]
    """Corpus options; the group file of conf/data names those of its kind."""
    cluster: ClusterSection
    hardware: HardwareSection
    launch: LaunchSection
    check: CheckSection
    watch: WatchSection
    audit: AuditSection
    checkpoint: CheckpointSection
    tracker: TrackerSection
    export: ExportSection
    plan: PlanSection
    deepspeed: dict[str, Any]
    """Raw DeepSpeed keys; `deepspeed.file=PATH` reads a JSON of them: file < groups < `deepspeed.KEY=VALUE`."""


def from_dict(cls: type[Any], value: Any) -> Any:
    """Builds dataclass `cls` from the plain dict that `dataclasses.asdict` made of it (nested too)."""
    hints = typing.get_type_hints(cls)
    kwargs = {f.name: _convert(hints[f.name], value[f.name]) for f in dataclasses.fields(cls) if f.name in value}
    return cls(**kwargs)


def _convert(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if (value is not None and origin is typing.Union) or origin is types.UnionType:
        inner = [a for a in args if a is not type(None)]
        return _convert(inner[0], value) if value is not None and len(inner) == 1 else value
    if origin is tuple and value is not None:
        return tuple(_convert(args[0], item) for item in value)
    if origin is list and value is not None:
        return [_convert(args[0], item) for item in value]
    return value


def option_types(cls: type[Any] = RunConfig, prefix: str = "") -> dict[str, str]:
    """{dotted name: type} of every option, in declaration order; free-form maps count as one."""
    hints = typing.get_type_hints(cls)
    options: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            options |= option_types(hint, f"{prefix}{field.name}.")
        else:
            options[prefix + field.name] = str(field.type)
    return options
