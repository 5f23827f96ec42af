"""Rollout workflows: one async function per kind of job."""
