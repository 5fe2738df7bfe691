"""From the command line of `async-tp` to an exit status: 0 all is hidden that can be, 1 not all."""

import json
import sys
from argparse import Namespace
from contextlib import redirect_stdout

from titanplans.errors import UserError
from titanplans.training.launch.logs import init_logging


def main(request: Namespace) -> int:
    """Decide what `request` asks and print it; return the exit status.

    Raises:
        UserError: it can't be asked as written.
    """
    with redirect_stdout(sys.stderr):  # stdout is the result's
        init_logging(0)
    from titanplans import kernels

    kernels.install("cpu")
    from titanplans.cli.async_tp.decide import decide
    from titanplans.cli.async_tp.screen import text, to_dict
    from titanplans.cli.verify.screen import progress
    from titanplans.cli.verify.subject import every_model, find_subject

    decisions, failures = [], {}
    for name in every_model() if request.all else [request.subject or ""]:
        try:
            subject = find_subject(name, request)
            for degree in subject.degrees or (2,):
                with redirect_stdout(sys.stderr), progress(name, shown=True) as show:
                    decisions.append(decide(subject, request, degree, show))
                if not request.json:
                    print(text(decisions[-1]), end="\n\n", flush=True)
        except UserError as error:
            if not request.all:
                raise
            failures[name] = str(error)
            print(f"error: {error}", file=sys.stderr)
    if request.json:
        found = [to_dict(decision) for decision in decisions]
        several = {"decisions": found} | ({"errors": failures} if failures else {})
        print(json.dumps(found[0] if len(found) == 1 and not request.all else several))
    return 0 if not failures and all(decision.complete for decision in decisions) else 1
