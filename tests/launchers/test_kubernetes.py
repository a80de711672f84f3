"""The manifests of docs/clusters.md suit Kubernetes and JobSet.

They have the right fields, and start the right processes.
"""

import pytest

from slipstream.runtime.processes.launch_environment import LaunchInfo, read_launch_info
from slipstream.runtime.protocol.rendezvous import Rendezvous
from tests.launchers.documents import PLANNING, blocks

pytestmark = pytest.mark.slow

yaml = pytest.importorskip("yaml", reason="PyYAML: not installed (make launchers)")
OLDEST = "1.31"
"""Version of Kubernetes that docs/clusters.md asks for."""


@pytest.fixture(scope="module")
def manifests():
    """By their kinds."""
    found = [
        manifest for block in blocks("Kubernetes", "yaml") for manifest in yaml.safe_load_all(block)
    ]
    return {manifest["kind"]: manifest for manifest in found}


def newest() -> str:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate: not installed (make launchers)"
    )
    return str(validator.latest_version())


@pytest.mark.parametrize("version", [lambda: OLDEST, newest], ids=["oldest", "newest"])
@pytest.mark.parametrize("kind", ["Service", "Job"])
def test_service_and_job_are_valid_for_kubernetes(manifests, kind, version):
    """By the published schemas, which allow no other fields."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate: not installed (make launchers)"
    )
    validator.validate(manifests[kind], version(), strict=True)
    template = manifests["Job"]["spec"]["template"]
    with pytest.raises(validator.ValidationError, match="restartpolicy"):
        template = {**template, "spec": {**template["spec"], "restartpolicy": "Never"}}
        validator.validate(
            {**manifests["Job"], "spec": {**manifests["Job"]["spec"], "template": template}},
            version(),
            strict=True,
        )


def test_the_indexed_job_that_plans_a_table_is_valid_for_kubernetes():
    """Its index is what shares are told by."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate: not installed (make launchers)"
    )
    (job,) = [yaml.safe_load(block) for block in blocks("On many machines", "yaml", PLANNING)]
    for version in (OLDEST, newest()):
        validator.validate(job, version, strict=True)
    assert (
        f"$JOB_COMPLETION_INDEX/{job['spec']['completions']}"
        in job["spec"]["template"]["spec"]["containers"][0]["args"][0]
    )


def test_job_set_is_valid_for_its_controller(manifests):
    """A JobSet passes types that are generated from JobSet's own.

    They drop what they do not know, and nothing is dropped.
    """
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api: not installed (make launchers)"
    )

    def read(manifest):
        return models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()

    job_set = manifests["JobSet"]
    assert read(job_set) == job_set
    assert read({**job_set, "spec": {**job_set["spec"], "networks": {}}}) == job_set, (
        "a field that it has not"
    )


def test_the_job_of_the_job_set_is_valid_for_kubernetes(manifests):
    """Its types say less of values than Kubernetes does."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate: not installed (make launchers)"
    )
    (template,) = [job["template"] for job in manifests["JobSet"]["spec"]["replicatedJobs"]]
    validator.validate(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template},
        newest(),
        strict=True,
    )


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_each_pod_is_told_which_node_it_is_and_where_node_0_is(manifests, kind):
    manifest = manifests[kind]
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    first, service = f"{name}-0", spec.get("template", {}).get("spec", {}).get("subdomain")
    if kind == "JobSet":  # <JobSet>-<replicated job>-<job>-<pod>.<subdomain>
        (nodes,) = spec["replicatedJobs"]
        first, service, spec = (
            f"{name}-{nodes['name']}-0-0",
            spec["network"]["subdomain"],
            nodes["template"]["spec"],
        )
    else:
        assert manifests["Service"]["metadata"]["name"] == service
        assert manifests["Service"]["spec"]["selector"] == {"job-name": name}
    (container,) = spec["template"]["spec"]["containers"]
    variables = {
        variable["name"]: variable["value"] for variable in container["env"] if "value" in variable
    }
    assert container["command"][:2] == ["sh", "-c"]
    assert container["command"][2].startswith("RANK=$JOB_COMPLETION_INDEX exec slipstream train ")
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert read_launch_info({**variables, "RANK": "3"}) == LaunchInfo(
        node=3, nodes=spec["completions"], master=Rendezvous(f"{first}.{service}", 29500)
    )
