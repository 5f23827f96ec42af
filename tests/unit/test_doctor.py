"""What the installation check says."""

from farflow.doctor import report


def test_a_numba_that_cannot_be_imported_is_named_with_the_reason(monkeypatch):
    monkeypatch.setattr("transport.weights.kernels.why_not", lambda: "Numba needs NumPy 1")
    lines, healthy = report()
    (line,) = [line for line in lines if "numba" in line]
    assert line.startswith("unused")
    assert "Numba needs NumPy 1" in line
    assert healthy
