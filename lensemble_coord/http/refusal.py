"""Errors as clients of the OpenAI API expect them."""

import msgspec

from lensemble.errors import ContextLengthExceeded, LensembleError, OperatorError, QueueFull

RETRY_AFTER_S = 2
INVALID, LIMITED, SERVER = "invalid_request_error", "rate_limit_error", "server_error"


class Refused(Exception):
    """A request that gets no answer, or no further one.

    Args:
        status: of HTTP.
        code: what programs look at.
        message: what is wrong and the way out.
        param: the field that is wrong.
        retry: whether the same request may be answered later.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, *, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry = retry

    @property
    def kind(self) -> str:
        """The ``type`` of the error."""
        if self.status == 429:
            return LIMITED
        return SERVER if self.status >= 500 else INVALID

    def body(self) -> bytes:
        """As JSON."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = [(b"content-type", b"application/json")]
        if self.retry:
            found.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        return found


def unsupported(param: str, why: str) -> Refused:
    """A field that would change the answer, and that is not honoured here."""
    return Refused(400, "unsupported_parameter", f"`{param}` is not supported: {why}", param)


def wrong(param: str, why: str) -> Refused:
    """A field with a value that cannot be."""
    return Refused(400, "invalid_value", f"`{param}` {why}", param)


def of(error: LensembleError) -> Refused:
    """How ``error`` looks to a client."""
    said = f"{error.message}. {error.remediation}".strip()
    match error:
        case ContextLengthExceeded():
            return Refused(400, error.code, said, "messages")
        case QueueFull():
            return Refused(429, error.code, said, retry=True)
        case OperatorError():
            return Refused(400, "invalid_value", said)
        case _:
            return Refused(500, error.code, said)
