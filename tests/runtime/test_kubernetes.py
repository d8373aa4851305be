"""The manifest of a run on Kubernetes has the fields that the kinds demand, and starts the ranks of the plan."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import Contradiction, DegreesMismatch
from hyper_parallel.runtime.kubernetes import manifest

Label = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]


class Strict(BaseModel):
    """A kind of which every field that is written is known."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Meta(Strict):
    name: Label
    namespace: Label | None = None


class ConfigMap(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: Meta
    data: dict[str, str]


class Mount(Strict):
    name: Label
    mountPath: Annotated[str, StringConstraints(pattern="^/")]
    readOnly: bool = False


class Resources(Strict):
    limits: dict[str, Annotated[int, Field(ge=1)]]


class Container(Strict):
    name: Label
    image: str
    command: list[str]
    volumeMounts: list[Mount]
    resources: Resources | None = None


class Source(Strict):
    name: str


class Claim(Strict):
    claimName: Label


class Memory(Strict):
    medium: Literal["Memory"]


class Volume(Strict):
    name: Label
    configMap: Source | None = None
    emptyDir: Memory | None = None
    persistentVolumeClaim: Claim | None = None


class Pod(Strict):
    restartPolicy: Literal["Never", "OnFailure"]
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume]


class PodTemplate(Strict):
    spec: Pod


class Job(Strict):
    backoffLimit: Annotated[int, Field(ge=0)]
    completions: Annotated[int, Field(ge=1)]
    parallelism: Annotated[int, Field(ge=1)]
    completionMode: Literal["Indexed"]
    template: PodTemplate


class JobTemplate(Strict):
    spec: Job


class Replicated(Strict):
    name: Label
    replicas: Annotated[int, Field(ge=1)]
    template: JobTemplate


class Network(Strict):
    enableDNSHostnames: bool
    subdomain: Label


class Failure(Strict):
    maxRestarts: Annotated[int, Field(ge=0)]


class Spec(Strict):
    network: Network
    failurePolicy: Failure
    replicatedJobs: Annotated[list[Replicated], Field(min_length=1)]


class JobSet(Strict):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Meta
    spec: Spec


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: llama-3-8b}\nparallel: {dp_shard: 32}\ntraining: {max_restarts: 2}\n")
    return path


GIVEN = (
    "launch.launcher=kubernetes", "launch.image=registry/hp:1", "launch.nnodes=4", "launch.nproc_per_node=8",
    "launch.volume=training", "launch.mount_path=/data", "launch.namespace=research",
)  # fmt: skip


def test_the_manifest_starts_every_rank(recipe, tmp_path):
    loaded = load_recipe(recipe, GIVEN).recipe
    text = manifest(loaded, 32, Path("/data/runs/My run_1"))
    first, second = list(yaml.safe_load_all(text))
    config, job = ConfigMap.model_validate(first), JobSet.model_validate(second)
    assert {config.metadata.name, job.metadata.name} == {"my-run-1"}
    assert {config.metadata.namespace, job.metadata.namespace} == {"research"}
    (ranks,) = job.spec.replicatedJobs
    assert (ranks.template.spec.completions, ranks.template.spec.parallelism) == (4, 4)
    assert job.spec.failurePolicy.maxRestarts == 2
    pod = ranks.template.spec.template.spec
    (container,) = pod.containers
    assert container.resources == Resources(limits={"nvidia.com/gpu": 8})
    assert {m.name for m in container.volumeMounts} == {v.name for v in pod.volumes}
    words = container.command
    # Name of the first pod, by JobSet's rule, in the subdomain of the job.
    assert f"--rdzv-endpoint=my-run-1-{ranks.name}-0-0.{job.spec.network.subdomain}:29500" in words
    assert {"--nnodes=4", "--nproc-per-node=8", "--max-restarts=2"} <= {*words}
    mounted = {m.mountPath: m.name for m in container.volumeMounts}
    assert str(Path(words[-1]).parent) in mounted
    (tmp_path / "again.yaml").write_text(config.data[Path(words[-1]).name])
    again = load_recipe(tmp_path / "again.yaml").recipe
    assert (again.parallel.dp_shard, again.training.max_restarts) == (32, 2)


def test_ranks_on_the_cpu_ask_for_no_accelerator(recipe):
    loaded = load_recipe(recipe, [*GIVEN, "launch.resource=null", "launch.volume=null"]).recipe
    job = JobSet.model_validate([*yaml.safe_load_all(manifest(loaded, 32, Path("/x/8b")))][1])
    assert job.metadata.name == "run-8b"
    pod = job.spec.replicatedJobs[0].template.spec.template.spec
    assert pod.containers[0].resources is None
    assert len(pod.volumes) == 2


def test_impossible_jobs_are_refused(recipe):
    with pytest.raises(Contradiction, match="container image"):
        load_recipe(recipe, ["launch.launcher=kubernetes"])
    with pytest.raises(DegreesMismatch):
        manifest(load_recipe(recipe, GIVEN).recipe, 30, Path("/x"))
