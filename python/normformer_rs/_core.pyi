"""The Rust extension. Configurations travel as JSON objects, as `Config.to_json` makes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .errors import DivergedError as DivergedError
from .errors import InputError as InputError
from .errors import Interrupted as Interrupted

__version__: str
BUILT_AGAINST: str
"""A sentence that names the torch version of the build."""

class Observer(Protocol):
    """Called between updates, with the GIL. A KeyboardInterrupt raised in a call stops the run."""

    def started(self, event: Mapping[str, Any]) -> None: ...
    def updated(self, event: Mapping[str, Any]) -> None: ...
    def evaluated(self, event: Mapping[str, Any]) -> None: ...
    def message(self, level: str, text: str) -> None: ...

def tables() -> str:
    """A JSON object, which _tables.json repeats: the version, the options, and the norms, residuals, inits and
    parametrisations."""

def parameter_parts(model: str, names: list[str], tensors: list[Tensor]) -> dict[str, tuple[str, str]]:
    """By the name of each parameter of a model its role (embedding, hidden-matrix, hidden-vector or end) and what its
    products are summed over (nothing, width, root-width or depth)."""

def unit_dimensions(model: str, names: list[str], tensors: list[Tensor]) -> dict[str, int]:
    """By the name of each matrix that `unit_matrices` keeps on the sphere, the dimension of its vectors."""

def unit_multipliers(model: str, names: list[str], tensors: list[Tensor]) -> dict[str, tuple[float, float, float]]:
    """By the name of each parameter of a model under u-mup its multipliers of lr, weight_decay and eps."""

def multipliers(
    parametrisation: str,
    role: str,
    width: float,
    depth: float,
    alpha: float | None = None,
    sums_over: str = "nothing",
    step_size: str = "entries",
) -> dict[Literal["init", "lr", "weight_decay", "eps"], float]:
    """A role's multipliers in a model `width` times as wide and `depth` times as deep as its base."""

def declare(model: str, stack: Literal["encoder", "decoder"], kinds: tuple[str, ...] | None = None) -> str:
    """A configuration's residual scheme in one stack: a JSON object of layers, flow, has_biases, … `kinds`: a layer's
    sublayers, where they are not the stack's."""

def composed_norm(x: Tensor, parameters: list[Tensor | None], options: list[float], name: str) -> Tensor: ...
def growth(steps: int, curve: Literal["linear", "exp", "sigmoid"], t: Tensor) -> Tensor:
    """α_t of a growing scheme, (1,) float64 on the device of t, which is int64 (1,)."""

def norm_settings(model: str, name: str, last_of_decoder: bool, ends_stack: bool) -> str:
    """The keyword arguments of a norm's module at a place of a model: a JSON object, infinity the word "inf"."""

def norm_numbers(name: str, width: int, given: str) -> list[list[float]]:
    """[start, offset, factor] of each parameter of a norm's module, of its keyword arguments as JSON; refuses options
    that cannot be meant."""

def step_by_rule(training: str, parameter: Tensor, gradient: Tensor, state: Sequence[Tensor], lr: float) -> None:
    """Makes one step of an optimizer's rule (muon, normuon or lion) with one matrix or vector, in place."""

def largest_logits(
    model: str,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    batches: Sequence[tuple[Tensor | None, Tensor]],
    precision: str,
) -> dict[str, float]:
    """The largest logit of each head in batches (source, target_input), without dropout, by the attention's name and
    the head's number."""

def clip_queries_and_keys(
    model: str, names: Sequence[str], tensors: Sequence[Tensor], largest: Mapping[str, float], limit: float
) -> None:
    """Makes QK-clip's part of an update, in place, for these largest logits."""

def profile(
    model: str,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    source: Tensor | None,
    target_input: Tensor,
    seed: Tensor,
    precision: str,
) -> None:
    """Sets, in place, the gains that the scheme takes from one training batch; arguments as forward's."""

def operator_counts() -> dict[str, tuple[int, int]]:
    """(kernel calls, composed calls) of each operator since the process started."""

def threads_in_kernels() -> int:
    """Threads that kernels may use, found by running one."""

def cpu_level(name: Literal["baseline", "avx2", "avx512"] | None = None) -> str:
    """Forces an instruction set, None: the best; the one in force."""

def cuda_stand_in(on: bool) -> None:
    """Sends tensors of the CPU through the CUDA kernels: for the tests, with a driver whose device is the host."""

def cuda_missing(device: int) -> str | None:
    """Why kernels do not run on a CUDA device; None: they run."""

def cuda_verdicts() -> list[str]:
    """What proofs have told of kernels here, a line each: device and driver, program, options, kernel, verdict, split
    by tabs."""

def cuda_programs() -> dict[str, dict[str, int]]:
    """The CUDA programs by name: the bytes of each struct that their kernels take."""

def cuda_compile(program: str, options: str, architecture: int) -> tuple[bytes, str]:
    """A CUDA program's binary for an architecture such as 90, and the compiler's remarks on registers and spills; it
    fails where the program lays a struct out in another way than Rust."""

def parameters(model: str, seed: int, device: str) -> list[tuple[str, Tensor]]:
    """New parameters by canonical name."""

def draw_linear(
    weight: Tensor,
    roles: list[str],
    model: str,
    stack: str,
    layer: int,
    sublayer: int,
    kinds: tuple[str, ...] | None = None,
) -> None:
    """Draws a linear layer's (roles·fan_out, fan_in) first values in place: a block of rows for each role."""

def run_options(model_dir: str, from_checkpoint: str | None = None) -> str:
    """JSON {model, training, data}: the options of a run's checkpoint, by default of the newest one; null: none."""

def check_run(model_dir: str) -> None:
    """Refuses a run's folder whose files are damaged."""

def is_runs(path: str) -> bool:
    """Whether a run wrote what lies at the path, a name in its folder."""

def join_line(line: str) -> str:
    """A line of split text with its words whole again: "a@@ b c" is "ab c"."""

def draw_bias(bias: Tensor, roles: list[str], fan_in: int, model: str) -> None:
    """Draws a linear layer's bias in place, one block of numbers for each role."""

def draw_table(weight: Tensor, name: str, model: str) -> None:
    """Draws a table's (V, d) first values in place; `name` is its parameter's."""

def load_model(model_dir: str, checkpoint: str) -> tuple[str, list[tuple[str, Tensor]]]:
    """A checkpoint's options as JSON, and its parameters and buffers by canonical name."""

def check_options(model: str, training: str) -> None:
    """Errors: InputError if options of a model and its training contradict each other."""

def forward(
    model: str,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    source: Tensor | None,
    target_input: Tensor,
    seed: Tensor | None,
    precision: str,
    heard: Callable[[str, str, int, list[Tensor]], None] | None = None,
) -> Tensor:
    """Logits (B, T, V) of source (B, S) and target_input (B, T), differentiable in `tensors`; seed None: evaluation.
    `heard` is called with each event of the pass, a parameter's or norm's name, a row and tensors."""

def observe(
    model: str,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    source: Tensor | None,
    target_input: Tensor,
    seed: Tensor | None,
    precision: str,
    loss: Callable[[Tensor], Tensor] | None,
) -> list[tuple[list[NDArray[np.float64]], list[list[float]]]]:
    """Of each stack cosines (layers,), active (layers,), sizes (layers + 1,), scores (attentions,) and mixing
    (connections,), and its norms' statistics (7,); seed None: evaluation."""

def statistics(
    x: Tensor,
    pad_mask: Tensor | None,
    weight: Tensor | None,
    mean: Tensor | None,
    square: Tensor,
    eps: float,
    dy: Tensor | None,
) -> list[float]:
    """Seven numbers: distances of mean, variance and ψ², their gradients' sizes, and the share that is bounded."""

def train(
    model: str,
    training: str,
    data: str,
    output: str,
    mode: Literal["new", "resume", "overwrite"],
    group: tuple[str, int, int] | None,
    observer: Observer,
    from_checkpoint: str | None = None,
    init_from: str | None = None,
) -> None:
    """Trains; writes log.jsonl, config.json, vocabulary.txt and checkpoints/ into `output`.

    `group`: the name of a process group of torch.distributed, this process's rank in it, and its size.
    `from_checkpoint`: the checkpoint that mode "resume" goes on from, if not the newest.
    `init_from`: a run, or RUN:CHECKPOINT, with whose weights a new one begins.
    """

def join_group(name: str, rank: int, size: int) -> None:
    """Tells the operators of a process group, which they then take by its name."""

def dry_run(model: str, training: str, data: str) -> str:
    """A JSON object of parameters, parameter_bytes, training_bytes and vocabulary."""

def translate(
    model_dir: str,
    source: list[str] | tuple[str, str, str | None, str | None],
    search: str,
    checkpoint: str,
    batch_tokens: int,
    precision: str,
    device: str,
) -> list[list[tuple[str, float, bool]]]:
    """For each line, or sentence of (data_bin, split, source_lang, target_lang), its best translations, best first:
    (text, score, finished)."""

def average(model_dir: str, count: int | None = None, updates: Sequence[int] | None = None) -> str:
    """The path of the new checkpoint "average"."""

def learn_bpe(lines: Sequence[str], operations: int) -> list[tuple[str, str]]:
    """The merges that training would learn from these lines, in their order."""

def keep_memory() -> None:
    """Asks glibc to keep freed memory for the next tensors of the same sizes."""

def generate(
    model_dir: str,
    prompts: list[str],
    generation: str,
    said: Callable[[int, int, str | None], None] | None,
    checkpoint: str,
    batch_tokens: int,
    precision: str,
    device: str,
) -> list[list[tuple[str, float, int, bool]]]:
    """Per prompt its texts: (text, log p, tokens, finished). `said` hears (prompt, sample, new text; None: over)."""

def evaluate_windows(
    model_dir: str,
    text: str,
    window: int | None,
    stride: int | None,
    checkpoint: str,
    precision: str,
    device: str,
) -> tuple[float, float, int, int, float, int, int, float]:
    """(nll, perplexity, tokens, words, word_perplexity, lines, characters, bits_per_character) of a file."""

def encode(model_dir: str, lines: list[str]) -> list[list[int]]:
    """The ids of lines as the run's model reads them, without EOS."""

def evaluate_loss(
    model_dir: str, source: str | None, target: str, checkpoint: str, precision: str, device: str
) -> tuple[float, float, float, int]:
    """(loss, nll, perplexity, tokens)."""

def save_model(
    output: str,
    model: str,
    training: str,
    dictionary: str,
    target_vocabulary: Sequence[bool] | None,
    names: Sequence[str],
    tensors: Sequence[Tensor],
) -> None:
    """Writes a model that was trained elsewhere as a run; `dictionary`, a dict.txt, says how many types there are."""

def write_arrays(output: str, texts: Mapping[str, str], names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Makes a folder with model.safetensors and files of text, complete or not at all."""

def target_vocabulary(model_dir: str) -> list[bool] | None:
    """The target vocabulary of a run, a flag for each type; None where it is the vocabulary."""

class Schedule:
    """A learning-rate schedule of the training loop, for other loops."""

    memory: str
    """Its state after the evaluations so far, as JSON."""

    def __init__(self, training: str, d_model: int) -> None: ...
    def learning_rate(self, n: int) -> float:
        """The rate of update n, 1 for the first."""

    def evaluated(self, n: int, score: float) -> None:
        """An evaluation after update n scored `score`, more being better."""

def bleu(
    hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False, tokenize: str | None = None
) -> str:
    """A JSON object of BLEU's numbers and multi-bleu.perl's line, `text`. None: its words, too."""
