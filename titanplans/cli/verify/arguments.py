"""Parse the command lines of `verify`, `list` and `async-tp`, without torch. `subject.py` interprets the SUBJECT."""

import argparse
import itertools
import shlex
from argparse import Namespace
from collections.abc import Collection, Iterable, Sequence
from os.path import isdir
from typing import Any, NoReturn

from titanplans.config import LoRA
from titanplans.config.families import find_flavor, plan_names
from titanplans.config.options import options_of
from titanplans.config.values import from_text
from titanplans.errors import VerifyError, did_you_mean
from titanplans.plan.degrees import Degrees
from titanplans.text import paragraph
from titanplans.user_code import check_package

_EXAMPLES = """\
SUBJECT is
  a named model                titanplans verify gla
  a job                        titanplans verify configs/gla_debug.toml
  a Hugging Face config.json   titanplans verify path/to/config.json
  a plan of your own           titanplans verify my_plans:MyPlan
                                   --model my_models:build
  ... with its Triton kernels  add --kernels real --tp 2 --quick

with GPU kernels, all ranks on one GPU, or one GPU for each rank:
  titanplans verify gla --device cuda
  torchrun --nproc-per-node 2 -m titanplans verify gla --process-group

exit status: 0 proved, 1 wrong, 2 can't be run as written (one line says why)"""

_ASYNC_TP_EXAMPLES = """\
  titanplans async-tp qwen3 --tp 2
  titanplans async-tp configs/gla_1.3B.toml --tp 8

exit status: 0 everything that torch's pass can fuse is fused, 1 something
is not fused, 2 can't be run as written (one line says why)"""


class _VerifyParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise VerifyError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the three commands. Its errors are VerifyErrors."""
    parser = _VerifyParser(
        prog="titanplans",
        description="Prove that a plan splits a model correctly, list plans, or find what async tensor parallelism fuses.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="{verify,list,async-tp}", required=True)
    list_parser = commands.add_parser(
        "list", help="list the registered plans, with model types and token mixers"
    )
    words = "print these plans' files and lines, what is sharded, and each flavor's largest tensor-parallel degree"
    list_parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help=words)
    list_parser.add_argument(
        "--long", action="store_true", help="print the same for every model type with a debug flavor"
    )
    shared: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    _add_verify(
        commands.add_parser(
            "verify",
            help="prove a plan: compare the training of the split model with the training of the unsplit model",
            description=paragraph(
                "Prove a plan: compare the training of the split model with the training of the unsplit model, "
                "without a GPU."
            ),
            epilog=_EXAMPLES,
            **shared,
        )
    )
    async_tp = commands.add_parser(
        "async-tp",
        help="find which collectives async tensor parallelism would fuse with matrix products",
        description=paragraph(
            "Find without a GPU which all-gathers and reduce-scatters of each block async tensor parallelism would fuse "
            "with matrix products. For the others, name the operators between the collective and its product."
        ),
        epilog=_ASYNC_TP_EXAMPLES,
        **shared,
    )
    _add_subject(async_tp, tokens="128, or more for an image", degrees="the job's, or 2")
    async_tp.set_defaults(
        cp=None,
        ep=None,
        pp=None,
        loss_parallel=None,
        sequence_parallel=None,
        ranks="threads",
        device=None,
    )
    return parser


def parse(argv: list[str]) -> Namespace:
    """Return the options of a command line, with defaults for options that are not set; `words` is the full line.

    Raises:
        VerifyError: an option is unknown, or its value is invalid.
    """
    request = parser().parse_args(argv)
    request.words = shlex.join(argv)
    if request.command == "list":
        for name in request.model_types:
            if (names := plan_names()) and name not in names:
                raise not_listed(name, names)
        return request
    request.degrees = combine_degrees(request.tp, request.cp, request.ep, request.pp)
    is_one_process = request.degrees == (Degrees(tp=1),) and request.ranks == "process_group"
    splits_nothing = any(degrees.tp_cp * degrees.pp == 1 for degrees in request.degrees or ())
    if splits_nothing and request.cp is None and not is_one_process:
        raise VerifyError(
            "a case whose degrees are all 1 splits nothing, so it proves nothing: use degrees of 2 or more, or "
            "--process-group --tp 1, which runs the code and kernels of the split model on one GPU"
        )
    if request.ranks == "process_group" and request.device is not None:
        raise VerifyError(
            f"--device {request.device}: only for ranks that are threads; each rank of a process group uses its GPU, or the "
            "CPU if there is none: remove it or --process-group"
        )
    if getattr(request, "kernels", None) == "real":
        if request.dtype == "float64":
            raise VerifyError(
                "--dtype float64: Triton kernels compute in float32: remove it or --kernels real"
            )
        request.dtype = "float32"
    for option in ("model", "flavor", "layers", "vocab_size"):
        if request.all and (value := getattr(request, option)) is not None:
            raise VerifyError(f"--{option.replace('_', '-')} {value}: goes with one SUBJECT, not with --all")
    request.lora = _lora(request.lora or ())
    _check_name(request.model, request.flavor, "--model")
    _check_name(request.subject, request.flavor, request.command)
    return request


def combine_degrees(
    tp: Sequence[int] | None,
    cp: Sequence[int] | None,
    ep: Sequence[int] | None,
    pp: Sequence[int] | None,
) -> tuple[Degrees, ...] | None:
    """Return every combination of the degrees; None if none is set.

    If only `ep` is set, each degree n gives two cases: experts over n tensor-parallel ranks, and over n context-parallel
    ranks.
    """
    if tp is None and cp is None and pp is None:
        only_ep = tuple(Degrees(ep=degree, **{axis: degree}) for degree in ep or () for axis in ("tp", "cp"))
        return only_ep or None
    combinations = itertools.product(tp or (1,), cp or (1,), ep or (1,), pp or (1,))
    return tuple(Degrees(tp=tp, cp=cp, ep=ep, pp=pp) for tp, cp, ep, pp in combinations)


def _lora(assignments: Iterable[str]) -> dict[str, Any]:
    hints, values = {field.name: field.hint for field in options_of(LoRA)}, {}
    for words in assignments:
        name, sign, value = words.partition("=")
        if not sign or name not in hints:
            raise VerifyError(f"--lora {words}: write KEY=VALUE, such as rank=8; {did_you_mean(name, hints)}")
        values[name] = from_text(value, hints[name], f"--lora {name}")
    return values


def _check_name(words: str | None, flavor: str | None, option: str) -> None:
    """Refuse an unknown model name or flavor. For `module:callable` only the package is checked; a path is not checked."""
    if words is not None and ":" in words:
        check_package(words, f"{option} {words}", VerifyError)
    if words is None or ":" in words or "/" in words or words.endswith((".toml", ".json")) or isdir(words):
        return
    find_flavor(words, flavor or "debug")


def not_listed(name: str, names: Collection[str]) -> VerifyError:
    """Return the error for a model type that `list` does not know, with the most similar of `names`."""
    instead = did_you_mean(name, names, "titanplans list has all")
    return VerifyError(f"list {name}: no plan with a debug flavor is registered for it; {instead}")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_subject(
        parser,
        tokens="16, or more for an image",
        degrees="2, 4 and 8, if the model allows them",
        has_all_degrees=True,
    )
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--loss-parallel", action=flag, help="shard logits over the vocabulary; default: prove both")
    add("--sequence-parallel", action=flag, help="shard the residual stream; default: prove both")
    add(
        "--dtype",
        choices=("float64", "float32"),
        help="default: float64, since rounding in float32 hides mistakes",
    )
    words = "real: interpret Triton kernels on the CPU, in float32, which takes minutes; default: PyTorch stand-ins"
    add("--kernels", choices=("stand-ins", "real"), default="stand-ins", help=words)
    words = "write the table to this file after each case, and the full printed output at the end"
    add("--output", metavar="FILE", help=words)
    add(
        "--quick",
        action="store_true",
        help="prove each condition once, at the smallest degree, and count no collectives",
    )
    words = "one rank per process that torchrun started; default: ranks are threads of this process"
    grouped: Any = {"action": "store_const", "const": "process_group", "default": "threads"}
    add("--process-group", dest="ranks", help=words, **grouped)
    words = "device for ranks that are threads; cuda: all ranks on one GPU, with its kernels; default: cpu"
    add("--device", choices=("cpu", "cuda"), help=words)


def _add_subject(
    parser: argparse.ArgumentParser, *, tokens: str, degrees: str, has_all_degrees: bool = False
) -> None:
    """Add the options of the model, its sizes and its degrees."""
    add = parser.add_argument
    size = {"type": _positive, "metavar": "N"}
    recipes = ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp")
    one = parser.add_mutually_exclusive_group(required=True).add_argument
    one("subject", nargs="?", metavar="SUBJECT", help="a named model, a job, a config.json or a plan")
    one("--all", action="store_true", help="every named model, one after the other, in its debug size")
    add("--model", metavar="MODEL", help="the model of a plan: a name, a config.json, or module:callable")
    add("--flavor", metavar="NAME", help="size of a named model; default: debug")
    add("--tp", type=degree_list, metavar="2,4,8", help=f"tensor-parallel degrees; default: {degrees}")
    if has_all_degrees:
        words = (
            "context-parallel degrees, combined with each --tp; default: 1, or 1 and 2 if no degree is set"
        )
        add("--cp", type=degree_list, metavar="2,4", help=words)
        words = (
            "expert-parallel degrees, combined with each --tp and --cp; if only --ep is set, N is proved over N "
            "tensor-parallel ranks and over N context-parallel ranks; default: 1, or 1 and 2 if no degree is set"
        )
        add("--ep", type=degree_list, metavar="2,4", help=words)
        words = "numbers of pipeline stages, combined with the other degrees; default: 1, or 1 and 2 if no degree is set"
        add("--pp", type=degree_list, metavar="2,4", help=words)
    words = f"convert Linear modules to float8: {', '.join(recipes[1:])}; default: none, or the job's recipe"
    add("--float8", choices=recipes, metavar="RECIPE", help=words)
    names: Any = {"type": lambda text: tuple(text.split(",")), "default": (), "metavar": "A,B"}
    add(
        "--float8-filter",
        **names,
        help="do not convert Linear modules whose names contain one of these strings",
    )
    words = "do not convert modules whose sizes are not multiples of 16"
    add("--float8-filter-unaligned", action="store_true", help=words)
    words = "add LoRA adapters: a key of [lora] and its value, such as rank=8; repeat for more keys"
    add("--lora", action="append", metavar="KEY=VALUE", help=words)
    add("--layers", **size, help="the first N blocks; default: the fewest that contain every kind of block")
    add(
        "--vocab-size",
        **size,
        help="size of the vocabulary; default: a smaller one that is split in the same way",
    )
    add("--seq-len", **size, help=f"tokens per sequence; default: {tokens}")
    add("--batch-size", **size, default=2, help="sequences per batch; default: 2")
    add("--json", action="store_true", help="print one JSON object on stdout, and nothing else")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def degree_list(text: str) -> tuple[int, ...]:
    """Return the degrees of a word such as "2,4,8"; the type of an argument."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of degrees above 0, such as 2 or 2,4,8")
    return tuple(dict.fromkeys(map(int, words)))
