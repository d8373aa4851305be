"""Kubernetes manifest of a run: a JobSet with torchrun in one pod per machine, and the recipe as a ConfigMap.

JobSet (`jobset.x-k8s.io`) gives every pod a stable host name. The torchrun agents rendezvous at the first pod unless
the recipe sets `launch.rdzv_endpoint`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from hyper_parallel.config import Recipe, recipe_to_yaml, time_limit_s, with_absolute_paths
from hyper_parallel.runtime.launchers import ranks_per_node, torchrun_words

_PORT: Final = 29500
"""Port of the rendezvous in the first pod; the default of torchrun."""
_RECIPE_FOLDER: Final = "/etc/hyper-parallel"
_JOB: Final = "ranks"
_QUEUE: Final = "kueue.x-k8s.io/queue-name"
"""Label that assigns a JobSet to a Kueue queue."""
_MOST_NAME: Final = 40
"""Maximum length of a job name: pod names add about 20 characters, and host names have at most 63."""


def manifest(recipe: Recipe, ranks: int, output_dir: Path) -> str:
    """Return the YAML manifest of a run for `kubectl apply -f`.

    Args:
        recipe: Recipe of the run.
        ranks: Number of ranks on all machines.
        output_dir: Directory of the run. Its name, as a DNS label of at most 40 characters, is the name of the job.

    Raises:
        DegreesMismatch: HP301 when `launch.nnodes * launch.nproc_per_node` is not `ranks`.
    """
    name = _name(output_dir.name)
    config_map: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"recipe.yaml": recipe_to_yaml(with_absolute_paths(recipe))},
    }
    parts = [config_map, _job_set(name, recipe, ranks)]
    if recipe.launch.namespace is not None:
        for part in parts:
            part["metadata"]["namespace"] = recipe.launch.namespace
    return yaml.safe_dump_all(parts, sort_keys=False, width=1000)


def _name(text: str) -> str:
    """Convert a text to a DNS label: lower-case letters, digits and hyphens, beginning with a letter."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (label if re.match(r"[a-z]", label) else f"run-{label}")[:_MOST_NAME].rstrip("-")


def _job_set(name: str, recipe: Recipe, ranks: int) -> dict[str, Any]:
    nodes = recipe.launch.nnodes
    pods: dict[str, Any] = {
        "backoffLimit": 0,
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "template": {"spec": _pod(name, recipe, ranks)},
    }
    failures: dict[str, Any] = {"maxRestarts": recipe.training.max_restarts}
    if recipe.launch.time is not None:
        pods["activeDeadlineSeconds"] = time_limit_s(recipe.launch.time)
        # A restart after the time limit would make the limit ineffective.
        late = {"name": "limitOfTime", "action": "FailJobSet"}
        failures["rules"] = [{**late, "onJobFailureReasons": ["DeadlineExceeded"]}]
    metadata: dict[str, Any] = {"name": name}
    if recipe.launch.partition is not None:
        metadata["labels"] = {_QUEUE: recipe.launch.partition}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": failures,
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": pods}}],
        },
    }


def _pod(name: str, recipe: Recipe, ranks: int) -> dict[str, Any]:
    launch, ranks_each = recipe.launch, ranks_per_node(recipe, ranks)
    endpoint = f"{name}-{_JOB}-0-0.{name}:{_PORT}"
    update = {"rdzv_endpoint": launch.rdzv_endpoint or endpoint}
    placed = recipe.model_copy(update={"launch": launch.model_copy(update=update)})
    words = torchrun_words(placed, ranks, ["train", f"{_RECIPE_FOLDER}/recipe.yaml"])
    container: dict[str, Any] = {
        "name": _JOB,
        "image": launch.image,
        "command": ["torchrun", *words],
        "volumeMounts": [
            {"name": "recipe", "mountPath": _RECIPE_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    volumes: list[dict[str, Any]] = [
        {"name": "recipe", "configMap": {"name": name}},
        # Collectives and snapshots of ranks on one machine use shared memory, 64 MiB by default.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if launch.resource is not None:
        container["resources"] = {"limits": {launch.resource: ranks_each}}
    if launch.volume is not None:
        volumes.append({"name": "files", "persistentVolumeClaim": {"claimName": launch.volume}})
        container["volumeMounts"].append({"name": "files", "mountPath": launch.mount_path})
    return {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
