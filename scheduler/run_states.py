"""What has become of a scheduler's runs, for who looks at its folder from outside."""

from pathlib import Path

import msgspec

from scheduler.backup import connected
from scheduler.core.state import Run
from scheduler.store import FILE_NAME
from transport.errors import StoreError


def run_states(folder: Path) -> dict[str, str]:
    """Every run's state by name, as it was committed last, whether the scheduler runs or not.

    Raises:
        StoreError: the rows cannot be read.
    """
    decode = msgspec.msgpack.Decoder(Run).decode
    with connected(folder / FILE_NAME, read_only=True) as connection:
        rows = connection.execute(
            "SELECT key, value FROM rows WHERE table_name = ?", (Run.table,)
        ).fetchall()
    try:
        return {name: decode(value).state for name, value in rows}
    except msgspec.MsgspecError as error:
        raise StoreError(f"{folder / FILE_NAME}: a run's row does not decode: {error}") from error
