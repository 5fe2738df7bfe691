"""The command lines of `verify`, `list` and `async-tp`. Needs no torch. subject.py resolves a SUBJECT."""

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
  ... with its Triton kernels  the same, and --kernels real --tp 2 --quick

by a GPU's own kernels, all ranks on one GPU, or each on its own:
  titanplans verify gla --device cuda
  torchrun --nproc-per-node 2 -m titanplans verify gla --process-group

exit status: 0 proved, 1 wrong, 2 not possible as asked (one line says why)"""

_ASYNC_TP_EXAMPLES = """\
  titanplans async-tp qwen3 --tp 2
  titanplans async-tp configs/gla_1.3B.toml --tp 8

exit status: 0 all that torch's pass can fuse is fused, 1 not all, 2 not
possible as asked (one line says why)"""


class _VerifyParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise VerifyError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the three commands; it refuses by a VerifyError."""
    parser = _VerifyParser(
        prog="titanplans",
        description="Prove that a plan splits a model right, list the plans, or tell what async tensor parallelism fuses.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="{verify,list,async-tp}", required=True)
    listed = commands.add_parser("list", help="the registered plans, with their model types and token mixers")
    words = "of these: file and lines of the plan, what a rank has a part of, the largest degree of each size"
    listed.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help=words)
    listed.add_argument(
        "--long", action="store_true", help="the same of every model type with a debug flavor"
    )
    shared: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    _add_verify(
        commands.add_parser(
            "verify",
            help="compare a training step of the split model with the whole one's",
            description=paragraph(
                "Compare a training step of the split model with the whole one's, on this machine, without a GPU."
            ),
            epilog=_EXAMPLES,
            **shared,
        )
    )
    async_tp = commands.add_parser(
        "async-tp",
        help="which collectives async tensor parallelism would fuse with matrix products",
        description=paragraph(
            "Decide, without a GPU, which gathers and scatters of each block async tensor parallelism would fuse with "
            "matrix products, and name the operators that keep the others apart from theirs."
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
    """Return the options of a command line, None if not given; `words` is the line itself.

    Raises:
        VerifyError: an unknown option, or an invalid value.
    """
    request = parser().parse_args(argv)
    request.words = shlex.join(argv)
    if request.command == "list":
        for name in request.model_types:
            if (known := plan_names()) and name not in known:
                raise not_listed(name, known)
        return request
    request.degrees = cuts(request.tp, request.cp, request.ep, request.pp)
    one_gpu = request.degrees == (Degrees(tp=1),) and request.ranks == "process_group"
    if any(cut.tp_cp * cut.pp == 1 for cut in request.degrees or ()) and request.cp is None and not one_gpu:
        raise VerifyError(
            "--tp 1 splits nothing, so nothing can be proved: name degrees of 2 or more, or over one GPU --process-group "
            "--tp 1, which runs the split model's whole path"
        )
    if request.ranks == "process_group" and request.device is not None:
        raise VerifyError(
            f"--device {request.device}: goes with threads; ranks of a process group compute on the GPU that each has, or "
            "on the CPU where there is none: leave it or --process-group out"
        )
    if getattr(request, "kernels", None) == "real":
        if request.dtype == "float64":
            raise VerifyError(
                "--dtype float64: Triton's kernels compute in float32; leave it or --kernels real out"
            )
        request.dtype = "float32"
    for option in ("model", "flavor", "layers", "vocab_size"):
        if request.all and (value := getattr(request, option)) is not None:
            raise VerifyError(f"--{option.replace('_', '-')} {value}: goes with one SUBJECT, not with --all")
    request.lora = _lora(request.lora or ())
    _check_name(request.model, request.flavor, "--model")
    _check_name(request.subject, request.flavor, request.command)
    return request


def cuts(
    tp: Sequence[int] | None,
    cp: Sequence[int] | None,
    ep: Sequence[int] | None,
    pp: Sequence[int] | None,
) -> tuple[Degrees, ...] | None:
    """Return the product of the degrees; of experts alone, over as many ranks of a layer and of a sequence; None: none."""
    if tp is None and cp is None and pp is None:
        alone = tuple(Degrees(ep=degree, **{axis: degree}) for degree in ep or () for axis in ("tp", "cp"))
        return alone or None
    every = itertools.product(tp or (1,), cp or (1,), ep or (1,), pp or (1,))
    return tuple(Degrees(tp=tp, cp=cp, ep=ep, pp=pp) for tp, cp, ep, pp in every)


def _lora(given: Iterable[str]) -> dict[str, Any]:
    hints, found = {field.name: field.hint for field in options_of(LoRA)}, {}
    for words in given:
        name, sign, value = words.partition("=")
        if not sign or name not in hints:
            raise VerifyError(f"--lora {words}: write KEY=VALUE, such as rank=8; {did_you_mean(name, hints)}")
        found[name] = from_text(value, hints[name], f"--lora {name}")
    return found


def _check_name(words: str | None, flavor: str | None, option: str) -> None:
    """Refuse what can only be the name of a model, and is not, or that of a flavor which it does not have."""
    if words is not None and ":" in words:
        check_package(words, f"{option} {words}", VerifyError)
    if words is None or ":" in words or "/" in words or words.endswith((".toml", ".json")) or isdir(words):
        return
    find_flavor(words, flavor or "debug")


def not_listed(name: str, known: Collection[str]) -> VerifyError:
    """Return the error for a plan that `list` can't find, with the nearest."""
    instead = did_you_mean(name, known, "titanplans list has all")
    return VerifyError(f"list {name}: no plan with a debug flavor is registered for it; {instead}")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_subject(
        parser, tokens="16, or more for an image", degrees="those of 2, 4, 8 that fit", contexts=True
    )
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--loss-parallel", action=flag, help="logits sharded over the vocabulary; default: both")
    add("--sequence-parallel", action=flag, help="the stream sharded over the sequence; default: both")
    add(
        "--dtype",
        choices=("float64", "float32"),
        help="default: float64; in fewer bits rounding hides mistakes",
    )
    words = "real: Triton's kernels, interpreted on a CPU, in float32, which takes minutes; default: stand-ins on a CPU"
    add("--kernels", choices=("stand-ins", "real"), default="stand-ins", help=words)
    words = "a file for the table so far, after each case, and in the end for the printed result"
    add("--output", metavar="FILE", help=words)
    add("--quick", action="store_true", help="each condition once at the smallest degree, and no collectives")
    words = "one rank in each process that torchrun started; default: threads of this process"
    grouped: Any = {"action": "store_const", "const": "process_group", "default": "threads"}
    add("--process-group", dest="ranks", help=words, **grouped)
    words = "where ranks that are threads compute: cuda: all on one GPU, by its own kernels; default: cpu"
    add("--device", choices=("cpu", "cuda"), help=words)


def _add_subject(
    parser: argparse.ArgumentParser, *, tokens: str, degrees: str, contexts: bool = False
) -> None:
    """Add the options of the model and its sizes."""
    add = parser.add_argument
    size = {"type": _positive, "metavar": "N"}
    recipes = ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp")
    one = parser.add_mutually_exclusive_group(required=True).add_argument
    one("subject", nargs="?", metavar="SUBJECT", help="a named model, a job, a config.json or a plan")
    one("--all", action="store_true", help="every named model, one after the other, in its debug size")
    add("--model", metavar="MODEL", help="for a plan: a named model, a config.json, or module:callable")
    add("--flavor", metavar="NAME", help="size of a named model; default debug")
    add("--tp", type=_degrees, metavar="2,4,8", help=f"degrees; default: {degrees}")
    if contexts:
        words = "degrees of context parallelism, each with each --tp, or alone; default: 1, and without --tp 2, too"
        add("--cp", type=_degrees, metavar="2,4", help=words)
        words = "degrees of expert parallelism, each with each --tp and --cp, or alone: as many ranks of each; default: 1"
        add("--ep", type=_degrees, metavar="2,4", help=words)
        words = "stages of a pipeline, each number with each of the other degrees, or alone; default: 1, and 2 with --tp 2"
        add("--pp", type=_degrees, metavar="2,4", help=words)
    words = (
        f"Linear modules in float8, whole and split: {', '.join(recipes[1:])}; default: none, or the job's"
    )
    add("--float8", choices=recipes, metavar="RECIPE", help=words)
    listed: Any = {"type": lambda text: tuple(text.split(",")), "default": (), "metavar": "A,B"}
    add("--float8-filter", **listed, help="parts of names of Linear modules that are not float8")
    words = "leave modules whose sizes are not multiples of 16 out of float8"
    add("--float8-filter-unaligned", action="store_true", help=words)
    words = (
        "LoRA adapters, whole and split: a key of [lora] and its value, as rank=8; as often as there are keys"
    )
    add("--lora", action="append", metavar="KEY=VALUE", help=words)
    add("--layers", **size, help="the first N blocks; default: as few as hold every kind of block")
    add("--vocab-size", **size, help="a vocabulary of N; default: the model's")
    add("--seq-len", **size, help=f"tokens in a sequence; default {tokens}")
    add("--batch-size", **size, default=2, help="sequences; default 2")
    add("--json", action="store_true", help="one JSON object on stdout, and nothing else")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _degrees(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of degrees above 0, such as 2 or 2,4,8")
    return tuple(dict.fromkeys(map(int, words)))
