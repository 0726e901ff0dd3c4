"""Every error Octavo raises on purpose. Messages name the numbers and the knob that changes them.

OctavoError
├── InvalidRequest      one request is wrong; `.field` names the culprit
│   └── RequestTooLarge     it can never fit, however long it waits
├── ConfigError         an option of the engine is wrong; `.option` names it
├── ModelError          a model's file is missing, corrupt or unsupported; `.path` names it
├── UnknownSession      the tenant has no session of this name
├── PinRefused          pinning would hold more of the pool than pins may
├── Overloaded          too many requests are queued: try again later
├── EngineDead          the engine's process is gone, or going
├── RequestFailed       computing one request went wrong: a fault in Octavo itself
└── AuditError          page accounting does not add up: a fault in Octavo itself
"""


class OctavoError(Exception):
    """Base of all errors raised on purpose."""


class InvalidRequest(OctavoError, ValueError):
    """A request is refused; nobody else is affected."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class RequestTooLarge(InvalidRequest):
    """A request needs more than the engine will ever have."""


class ConfigError(OctavoError, ValueError):
    """An engine option is out of range or contradicts another."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


class ModelError(OctavoError):
    """A model cannot be found, read or run."""

    def __init__(self, path: object, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = str(path)


class UnknownSession(OctavoError, KeyError):
    """There is no session of this name, or it is somebody else's."""

    __str__ = Exception.__str__


class PinRefused(OctavoError):
    """A session's pages cannot be pinned: the message names what they take and what pins may hold."""


class Overloaded(OctavoError):
    """The queue is full. The request was not taken, and may be sent again."""


class EngineDead(OctavoError):
    """The process that computes is gone, or is being stopped; what was asked of it is lost."""


class RequestFailed(OctavoError):
    """Computing a request went wrong; nobody else is affected."""


class AuditError(OctavoError, AssertionError):
    """The audit found a page in two states, or a count that does not match its holders."""
