"""What an agent says of itself to Prometheus on its own box: what its heartbeats say."""

from edge_agent.core.machine import AgentCore
from edge_agent.engine import Engine
from transport.runtime.clock import Clock
from transport.runtime.metrics_http import serve_metrics
from transport.telemetry import page


def metrics_page(core: AgentCore, slots: int, now: float) -> bytes:
    """The page; ``now`` on the core's clock."""
    sign = core.heartbeat(now)
    versions = sorted(sign.versions.items())
    return page(
        "agent",
        {
            "farflow_edge_tokens_total": [((), sign.tokens_generated)],
            "farflow_edge_running_sequences": [((), sign.running_sequences)],
            "farflow_edge_waiting_sequences": [((), sign.waiting_sequences)],
            "farflow_edge_slots": [((), slots)],
            "farflow_edge_sent_bytes_total": [((), sign.bytes_up)],
            "farflow_edge_received_bytes_total": [((), sign.bytes_down)],
            "farflow_edge_spool_bytes": [((), sign.spool_bytes)],
            "farflow_edge_attempts": [((), len(sign.held))],
            "farflow_edge_policy_version": [((policy,), ref.version) for policy, ref in versions],
            "farflow_edge_gpu_power_watts": [
                ((str(index),), gpu.power_w)
                for index, gpu in enumerate(sign.gpus)
                if gpu.power_w is not None
            ],
            "farflow_edge_gpu_temperature_celsius": [
                ((str(index),), gpu.temperature_c)
                for index, gpu in enumerate(sign.gpus)
                if gpu.temperature_c is not None
            ],
        },
    )


async def serve(port: int, core: AgentCore, engine: Engine, clock: Clock) -> None:
    """Serve the page on ``port`` until cancelled; at 0 there is none."""
    await serve_metrics(
        port,
        lambda: metrics_page(core, engine.slots, clock.monotonic_s()),
        "agent.metrics_port",
    )
