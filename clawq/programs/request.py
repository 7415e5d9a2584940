"""How an exec'ed program talks to whoever started it: one JSON request on stdin, one JSON answer on stdout.

Simulators and libraries print what they like; so stdout is kept for the answer alone, and everything else that is
written to it goes to stderr. An error becomes {"error", "kind"} and an exit status other than 0.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from clawq.errors import ClawqError, UserError
from clawq.spawning.logfile import log_level

Answer = dict[str, Any]
log = logging.getLogger(__name__)


def answer_request(answer: Callable[[dict[str, Any]], Answer]) -> NoReturn:
    """Answer the request on stdin and exit."""
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    status, reply = _reply(answer)
    stdout.write(json.dumps(reply) + "\n")
    stdout.close()
    # Simulators and GL drivers may crash or hang in their own exit code; the answer is out, so nothing is lost.
    sys.stderr.flush()
    os._exit(status)


def _reply(answer: Callable[[dict[str, Any]], Answer]) -> tuple[int, Answer]:
    from pydantic import ValidationError

    try:
        logging.basicConfig(level=log_level("WARNING"), stream=sys.stderr)
        request = json.load(sys.stdin)
        if not isinstance(request, dict):
            raise UserError("the request on stdin must be a JSON object")
        return 0, answer(request)
    except ClawqError as error:
        return 2 if isinstance(error, UserError) else error.exit_code, _error(error, str(error))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}" for mistake in error.errors()]
        return 2, _error(error, f"{error.title}: " + "; ".join(lines))
    except json.JSONDecodeError as error:
        return 2, _error(error, f"the request on stdin is no JSON: {error}")
    except Exception as error:
        log.exception("the program failed")
        return 70, _error(error, f"{type(error).__name__}: {error}")


def _error(error: Exception, text: str) -> Answer:
    return {"error": text, "kind": type(error).__name__}
