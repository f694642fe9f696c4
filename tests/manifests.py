"""The manifests and container recipes of `ingest/deploy` and `trainer/deploy`, held against the schemas that Kubernetes and JobSet publish.

    python3 tests/manifests.py             exit 0 they hold, 1 one does not: each trouble is a line
    python3 tests/manifests.py --crd FILE  the JobSet also by JobSet's own jobset.x-k8s.io_jobsets.yaml

It needs the packages of manifests.txt. Objects of core Kubernetes are held against the JSON Schemas of kubernetes-validate, which know
every field; a JobSet against the models of kubeflow-trainer-api, and its template of a Job as a Job. What schemas do not say is
held here: numbers that have to agree, claims and containers that have to exist, files that a recipe copies.
"""

import copy
import pathlib
import sys

import jsonschema
import kubernetes_validate
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from pydantic import BaseModel, ValidationError

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = [ROOT / "ingest/deploy", ROOT / "trainer/deploy"]
# The first release in which everything is stable that the manifests use, but for retries by index, which it has by default.
OLDEST = "1.31"
# What a restart does not change (trainer/docs/faults.md).
FINAL = [1, 2, 3, 4, 5]


class Once(yaml.SafeLoader):
    """YAML in which a key may not stand twice."""


def mapping(loader, node):
    keys = [loader.construct_object(key) for key, _ in node.value]
    if len(keys) != len(set(keys)):
        raise yaml.constructor.ConstructorError(None, None, f"a key stands twice: {keys}", node.start_mark)
    return loader.construct_mapping(node, deep=True)


Once.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)


def by_schema(thing):
    """What the schemas of the oldest and of the newest release say against an object."""
    found = []
    for release in [OLDEST, kubernetes_validate.latest_version()]:
        try:
            kubernetes_validate.validate(thing, release, strict=True)
        except jsonschema.ValidationError as error:
            found.append(f"{release}: {'.'.join(map(str, error.path))}: {error.message[:200]}")
    return found


def unknown(model, thing, at=""):
    """Fields of an object that a model does not have; pydantic passes over them."""
    for name, value in thing.items() if isinstance(thing, dict) else []:
        field = next((own for key, own in model.model_fields.items() if name == (own.alias or key)), None)
        if field is None:
            yield f"{at}{name}: no such field"
            continue
        for sub in (sub for sub in models(field.annotation) if issubclass(sub, BaseModel)):
            for number, one in enumerate(value if isinstance(value, list) else [value]):
                yield from unknown(sub, one, f"{at}{name}.{number}." if isinstance(value, list) else f"{at}{name}.")


def models(annotation):
    """The classes that an annotation such as Optional[List[Model]] names."""
    arguments = getattr(annotation, "__args__", None)
    if arguments is None:
        return [annotation] if isinstance(annotation, type) else []
    return [sub for one in arguments for sub in models(one)]


def by_models(thing):
    """What the models of Kubeflow's client say against a JobSet, whose templates of Jobs they do not read: numbers with units."""
    thing = copy.deepcopy(thing)
    for own in thing["spec"]["replicatedJobs"]:
        own["template"] = {}
    try:
        JobsetV1alpha2JobSet.model_validate(thing)
    except ValidationError as error:
        return [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return list(unknown(JobsetV1alpha2JobSet, thing))


def strict(schema):
    """A schema of a CRD in which unknown fields are wrong, as `kubectl` takes them."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    if isinstance(schema.get("properties"), dict) and "type" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def by_crd(thing, path):
    """What JobSet's own definition says against it."""
    crd = yaml.load(pathlib.Path(path).read_text(), yaml.CSafeLoader)
    version = next(one for one in crd["spec"]["versions"] if thing["apiVersion"].endswith("/" + one["name"]))
    schema = strict(version["schema"]["openAPIV3Schema"])
    # The definition leaves it to the server.
    schema["properties"]["metadata"].pop("additionalProperties", None)
    found = jsonschema.Draft7Validator(schema).iter_errors(thing)
    return [f"{'.'.join(map(str, one.absolute_path))}: {one.message[:200]}" for one in found]


def jobs(thing):
    """The Jobs of an object."""
    if thing["kind"] == "Job":
        yield thing
    for own in thing["spec"]["replicatedJobs"] if thing["kind"] == "JobSet" else []:
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": own["name"]}, **own["template"]}


def of_job(job, claims):
    """What no schema says of a Job."""
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    names = [one["name"] for one in pod["containers"]]
    volumes = {one["name"]: one for one in pod["volumes"]}
    if pod["restartPolicy"] != "Never":
        yield "restartPolicy: a pod failure policy needs Never"
    rules = [one["onExitCodes"] for one in spec["podFailurePolicy"]["rules"] if "onExitCodes" in one]
    if [(rule["operator"], rule["values"]) for rule in rules] != [("In", FINAL)]:
        yield f"podFailurePolicy: exit codes {rules}, wanted {FINAL}"
    if any(rule["containerName"] not in names for rule in rules):
        yield f"podFailurePolicy: a container that is none of {names}"
    if spec.get("completionMode") == "Indexed" and spec["parallelism"] > spec["completions"]:
        yield "parallelism: more than completions"
    if ("backoffLimit" in spec) == ("backoffLimitPerIndex" in spec):
        yield "backoffLimit or backoffLimitPerIndex, one of them"
    for name, volume in volumes.items():
        if "persistentVolumeClaim" in volume and volume["persistentVolumeClaim"]["claimName"] not in claims:
            yield f"volumes.{name}: no such claim"
    for container in pod["containers"]:
        mounted = {one["name"] for one in container["volumeMounts"]}
        if mounted != set(volumes):
            yield f"volumeMounts: {sorted(mounted)}, volumes: {sorted(volumes)}"
        values = {one["name"]: one.get("value") for one in container["env"]}
        if "NODES" in values and not int(values["NODES"]) == spec["completions"] == spec["parallelism"]:
            yield "NODES, completions and parallelism differ"
        devices = [int(number) for name, number in container["resources"]["limits"].items() if name.endswith("/gpu")]
        if devices and devices[0] != int(container["command"][1]):
            yield f"{devices[0]} devices for {container['command'][1]} ranks"


def of_jobset(thing):
    """What no schema says of a JobSet."""
    own = {one["name"]: one["template"]["spec"] for one in thing["spec"]["replicatedJobs"]}
    if thing["spec"]["coordinator"]["replicatedJob"] not in own:
        yield "coordinator: no such replicated job"
    if any(spec.get("backoffLimit") != 0 for spec in own.values()):
        yield "backoffLimit: a lost pod has to end its Job, so that all start again"
    # The name of a pod is a label.
    if any(len(f"{thing['metadata']['name']}-{name}-0-0.{thing['metadata']['name']}") > 63 for name in own):
        yield "metadata.name: too long"


def of_recipe(path):
    """Files that a container recipe copies from the checkout, and stages that it names."""
    stages = set()
    for line in path.read_text().replace("\\\n", " ").splitlines():
        words = line.split()
        if words[:1] == ["FROM"]:
            stages.update(words[3:4])
        if words[:1] != ["COPY"]:
            continue
        source = [one for one in words[1:] if not one.startswith("--")][:-1]
        stage = next((one.removeprefix("--from=") for one in words if one.startswith("--from=")), None)
        if stage is None:
            yield from (f"COPY {one}: no such file" for one in source if not (ROOT / one).exists())
        elif stage not in stages and ":" not in stage:
            yield f"COPY --from={stage}: no such stage"


def main(crd=None):
    troubles, count = [], 0
    paths = [path for folder in FOLDERS for path in sorted(folder.glob("*.yaml"))]
    things = [(path, thing) for path in paths for thing in yaml.load_all(path.read_text(), Once)]
    claims = {thing["metadata"]["name"] for _, thing in things if thing["kind"] == "PersistentVolumeClaim"}
    for path, thing in things:
        said, own = [], list(jobs(thing))
        if thing["kind"] == "JobSet":
            said += by_models(thing) + (by_crd(thing, crd) if crd else [])
        for one in own or [thing]:
            said += by_schema(one)
        # What is not even of its kind is not read any further.
        if not said:
            said += of_jobset(thing) if thing["kind"] == "JobSet" else []
            said += [trouble for job in own for trouble in of_job(job, claims)]
        count += 1
        troubles += [f"{path.relative_to(ROOT)}: {thing['kind']} {thing['metadata']['name']}: {one}" for one in said]
    for folder in FOLDERS:
        recipe = folder / "Containerfile"
        troubles += [f"{recipe.relative_to(ROOT)}: {one}" for one in of_recipe(recipe)]
    print("\n".join(troubles) or f"{count} objects hold")
    return 1 if troubles else 0


if __name__ == "__main__":
    command = sys.argv[1:]
    if not command:
        sys.exit(main())
    if len(command) == 2 and command[0] == "--crd":
        sys.exit(main(command[1]))
    print(__doc__)
    sys.exit(2)
