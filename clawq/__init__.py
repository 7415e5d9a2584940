"""clawq: asynchronous, distributed reinforcement learning of robot hands over Celery, Redis Streams and PyTorch.

Importing this package loads none of torch, redis, celery or gymnasium (tested): every heavy import lives in the
module that needs it, so that `clawq --help` is quick and Celery workers stay light.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
