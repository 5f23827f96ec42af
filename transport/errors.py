"""Every error of farflow, in one tree.

    FarflowError
    ├─ ConfigError                    exit status 78; names file, key and remedy
    ├─ ProtocolError                  a message breaks the wire's rules
    │   ├─ LocalProtocolError         our own bug
    │   ├─ RemoteProtocolError        the peer's fault; never fatal to us
    │   ├─ VersionRefused             other protocol major
    │   └─ AuthenticationFailed       unknown key, or a role that may not say this
    ├─ LinkError                      (retryable)
    │   ├─ LinkClosed                 we closed it
    │   ├─ PeerUnreachable            nobody behind that route now
    │   └─ WindowFull                 the peer does not keep up; try later
    ├─ IntegrityError                 bytes are not what was promised
    │   ├─ ChecksumMismatch           (retryable) digest of a chunk, file or state differs
    │   ├─ TruncatedBlob              (retryable)
    │   ├─ SizeLimitExceeded          more than the limit, before any work was done
    │   └─ BaseVersionMismatch        a delta for other base weights
    ├─ EngineError
    │   ├─ GenerationFailed           one request failed
    │   ├─ WeightApplyFailed          the engine did not take the weights
    │   └─ EngineCrashed              (retryable) the engine's process died, with all that was in it
    ├─ ModelError                     a model folder does not load; names the file
    ├─ TaskError                      a task source or item is malformed; names file, line, field
    ├─ RewardError                    a verifier crashed or timed out
    ├─ ToolError                      a tool cannot do what a workflow asked of it
    ├─ StoreError                     (retryable) disk full, read-only, locked
    ├─ ProcessFailed                  a child process did not start, or ends again and again
    └─ InvariantViolation             never caught below main

``code`` is the stable name on the wire, in metrics and in logs; ``retryable`` says whether the
same call may succeed later.
"""

from typing import ClassVar


class FarflowError(Exception):
    """Base of all; never raised itself."""

    code: ClassVar[str] = "farflow"
    retryable: ClassVar[bool] = False


class ConfigError(FarflowError):
    code = "config"


class ProtocolError(FarflowError):
    code = "protocol"


class LocalProtocolError(ProtocolError):
    code = "protocol.local"


class RemoteProtocolError(ProtocolError):
    code = "protocol.remote"


class UnknownKind(RemoteProtocolError):
    code = "protocol.kind"


class VersionRefused(ProtocolError):
    code = "protocol.version"


class AuthenticationFailed(ProtocolError):
    code = "protocol.authentication"


class LinkError(FarflowError):
    code = "link"
    retryable = True


class LinkClosed(LinkError):
    code = "link.closed"
    retryable = False


class PeerUnreachable(LinkError):
    code = "link.unreachable"


class WindowFull(LinkError):
    code = "link.window_full"


class IntegrityError(FarflowError):
    code = "integrity"


class ChecksumMismatch(IntegrityError):
    code = "integrity.checksum"
    retryable = True


class TruncatedBlob(IntegrityError):
    code = "integrity.truncated"
    retryable = True


class SizeLimitExceeded(IntegrityError):
    code = "integrity.size"


class BaseVersionMismatch(IntegrityError):
    code = "integrity.base"


class EngineError(FarflowError):
    code = "engine"


class GenerationFailed(EngineError):
    code = "engine.generation"


class WeightApplyFailed(EngineError):
    code = "engine.apply"


class EngineCrashed(EngineError):
    """The process that generates died, or ran out of memory; it is started again."""

    code = "engine.crashed"
    retryable = True


class ModelError(FarflowError):
    code = "model"


class TaskError(FarflowError):
    code = "task"


class RewardError(FarflowError):
    code = "reward"


class ToolError(FarflowError):
    code = "tool"


class StoreError(FarflowError):
    code = "store"
    retryable = True


class ParentLost(StoreError):
    """No intact file leads to the weights that a delta changes."""

    code = "store.parent_lost"
    retryable = False


class ProcessFailed(FarflowError):
    code = "process"


class InvariantViolation(FarflowError):
    code = "invariant"
