"""`python -m clawq.programs.probe`: what does an environment show and take?

Reads {"environment": {"name", "options"}} from stdin and prints the environment spec as JSON, so that the learner
never imports a simulator. What goes wrong comes as {"error", "kind"} with exit status 2. No torch here.
"""

from typing import Any

from clawq.programs.request import Answer, answer_request


def probe(request: dict[str, Any]) -> Answer:
    """The spec of the environment that the request names, as JSON.

    Raises:
        UserError: no such plugin, wrong options, an environment that cannot be made or carried.
    """
    from clawq.config import Environment
    from clawq.plugins import load

    choice = Environment.model_validate(request["environment"])
    plugin = load("environments", choice.name)
    env = plugin.make(plugin.Options.model_validate(choice.options), 1)
    try:
        spec: Answer = env.spec.to_json()
        return spec
    finally:
        env.close()


if __name__ == "__main__":
    answer_request(probe)
