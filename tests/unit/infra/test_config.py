from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from infra.config import Loaded, config_digest, flat, load, masked, secrets, shown
from infra.config_errors import dotted
from infra.secrecy import Redactor
from infra.settings import Settings
from schemas.errors import SettingError

TOML = """
[run]
name = "demo"
[policies.main]
model = "models/tiny"
[policies.main.train]
learning_rate = 1e-6
[policies.main.task]
environment = "prompts"
settings = { file = "data/prompts.jsonl", reward = "mine:reward" }
[policies.solver-2]
model = "/models/other"
[regions.east]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "offsetrl.toml"
    path.write_text(TOML)
    return path


def refusal(config: Path, *overrides: str, **environ: str) -> str:
    with pytest.raises(SettingError) as caught:
        load(config, overrides, environ)
    return str(caught.value)


def test_later_layers_win_and_every_value_knows_its_layer(config: Path) -> None:
    environ = {"OFFSETRL_RUN__SEED": "7", "OFFSETRL_RUN__PARTITIONS": "3", "HOME": "/nowhere"}
    loaded = load(config, ["run.seed=8"], environ)
    assert (loaded.settings.run.name, loaded.settings.run.seed, loaded.settings.run.partitions) == ("demo", 8, 3)
    assert loaded.origins["run.seed"] == "--set"
    assert loaded.origins["run.partitions"] == "environment OFFSETRL_RUN__PARTITIONS"
    assert loaded.origins["run.name"] == "file offsetrl.toml"
    assert loaded.origins["run.inboxes"] == "default"
    assert loaded.origins["regions.east.bucket"] == "default"
    assert set(loaded.origins) == {dotted(key) for key, _ in flat(loaded.settings)}


def test_the_last_of_two_overrides_counts(config: Path) -> None:
    assert load(config, ["run.seed=1", "run.seed=2"], {}).settings.run.seed == 2


def test_one_override_reaches_one_policy_or_all(config: Path) -> None:
    one = load(config, ["policies.main.train.learning_rate=0"], {}).settings.policies
    assert (one["main"].train.learning_rate, one["solver-2"].train.learning_rate) == (0.0, 1e-6)
    both = load(config, ["policies.*.train.learning_rate=3e-4"], {}).settings.policies
    assert {table.train.learning_rate for table in both.values()} == {3e-4}


def test_a_policy_with_a_hyphen_can_be_named_in_the_environment(config: Path) -> None:
    settings = load(config, [], {"OFFSETRL_POLICIES__SOLVER_2__TRAIN__STEPS": "5"}).settings
    assert settings.policies["solver-2"].train.steps == 5


def test_kafkas_usual_variable_is_accepted_below_our_own(config: Path) -> None:
    usual = {"KAFKA_BOOTSTRAP_SERVERS": "a:9092"}
    assert load(config, [], usual).settings.kafka.bootstrap_servers == "a:9092"
    both = {**usual, "OFFSETRL_KAFKA__BOOTSTRAP_SERVERS": "b:9092"}
    assert load(config, [], both).settings.kafka.bootstrap_servers == "b:9092"


def test_relative_paths_start_at_the_file_whichever_layer_gives_them(config: Path) -> None:
    folder = config.parent.resolve()
    loaded = load(config, ["run.folder=out"], {"OFFSETRL_KAFKA__SASL_PASSWORD_FILE": "pw"}).settings
    assert loaded.policies["main"].model == folder / "models/tiny"
    assert loaded.policies["solver-2"].model == Path("/models/other")
    assert loaded.run.folder == folder / "out"
    assert loaded.embedded.state == folder / "state"
    assert loaded.kafka.sasl_password_file == folder / "pw"
    assert loaded.policies["main"].task.settings == {
        "file": str(folder / "data/prompts.jsonl"),
        "reward": "mine:reward",
    }


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("policies.main.train.learning_rate=1e-6", "learning_rate", 1e-6),
        ("policies.main.train.betas=[0.8, 0.9]", "betas", (0.8, 0.9)),
        ("policies.main.train.loss=mine:loss", "loss", "mine:loss"),
        ('policies.main.train.loss="mine:loss"', "loss", "mine:loss"),
        ("policies.main.train.dtype=bfloat16", "dtype", "bfloat16"),
        ("policies.main.train.settings.ppo-clip.low=0.2", "settings", {"ppo-clip": {"low": 0.2}}),
    ],
)
def test_values_of_the_command_line_are_read_by_what_the_key_holds(
    config: Path, override: str, key: str, value: Any
) -> None:
    assert getattr(load(config, [override], {}).settings.policies["main"].train, key) == value


def test_text_that_looks_like_a_number_stays_text(config: Path) -> None:
    settings = load(config, ["run.name=123", 'kafka.client."client.rack"=7'], {}).settings
    assert (settings.run.name, settings.kafka.client) == ("123", {"client.rack": "7"})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policies.main.train.learning_rat=0.5", "did you mean 'learning_rate'?"),
        ("policies.main.train.learning_rat=0.5", "policies.main.train.learning_rat is not a setting"),
        ("learning_rate=0.5", "it exists as policies.NAME.train.learning_rate"),
        ("runn.seed=1", "did you mean 'run'?"),
        ('policies.main.dispatch.group_size="8"', 'group_size = "8" (--set) must be a whole number, without quotes'),
        ("policies.main.train.max_staleness=-1", "max_staleness = -1 (--set) must be at least 0"),
        ("policies.main.rollout.pickup=1", "must be true or false"),
        ("policies.main.dispatch.lifetime_s=inf", "must be a finite number"),
        ("policies.main.train.dtype=float8", "must be one of 'float32' or 'bfloat16'"),
        ("run.seed=1.5", "must be a whole number"),
        ("run.name.x=1", "run.name holds one value and is no table"),
        ("run.name=Bad_Name", "must be 1 to 63 of a-z, 0-9 and '-'"),
        ("policies.Bad_Name.model=x", "policies name 'Bad_Name' must be 1 to 63"),
        ("policies.third.train.steps=1", "policies.third.model is missing"),
        ("policies={}", "policies is missing: at least one table [policies.NAME]"),
        ("run=1", "run = 1 (--set) must be a table"),
        ("s3.endpoint_url=store:9000", "must be a URL that begins with http"),
        ("kafka.bootstrap_servers=broker", "must be host:port"),
        ("regions.west.bucket=offsetrl-east", "needs a bucket of its own"),
        ("policies.main.train.publish_every=9", "at most max_staleness + 1 = 3"),
        ("policies.main.rollout.heartbeat_s=9", "taken for lost"),
        ("seed", "--set takes KEY=VALUE"),
        ("a b=1", "--set takes KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_refused_in_a_sentence(config: Path, override: str, said: str) -> None:
    assert said in refusal(config, override)


def test_the_file_is_as_strict_as_the_command_line(config: Path) -> None:
    config.write_text(TOML + '[policies.main.dispatch]\ngroup_size = "8"\n')
    assert 'group_size = "8" (file offsetrl.toml) must be a whole number' in refusal(config)


def test_an_unknown_variable_is_refused_and_foreign_ones_are_not(config: Path) -> None:
    assert "(environment OFFSETRL_RUN__SED)" in refusal(config, OFFSETRL_RUN__SED="1")
    load(config, [], {"OFFSETRL_PARENT": "12", "OFFSETRLX__A": "1"})


def test_all_wrong_settings_are_named_at_once(config: Path) -> None:
    text = refusal(config, "run.sed=1", "policies.main.train.step=2")
    assert text.startswith("2 settings are wrong:") and "run.sed" in text and "policies.main.train.step" in text


def test_files_that_cannot_be_read_say_why(config: Path) -> None:
    assert "there is no settings file" in refusal(config.parent / "other.toml")
    config.write_text("[run\n")
    assert "is not a valid TOML file" in refusal(config) and "line 1" in refusal(config)
    assert "cannot read the settings file" in refusal(config.parent)


def test_without_a_file_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(None, [], {}).settings
    assert list(settings.policies) == ["main"]
    assert settings.embedded.state == tmp_path.resolve() / "state"


SECRETS = {
    "OFFSETRL_KAFKA__SASL_PASSWORD": "s3cr3t-KAFKA",
    "OFFSETRL_S3__SECRET_KEY": 's3cr3t"S3',
    "OFFSETRL_REGIONS__EAST__SECRET_KEY": "s3cr3t-EAST",
    "OFFSETRL_KAFKA__CLIENT__SSL_PASSWORD": "s3cr3t-SSL",
}


def test_secrets_are_in_nothing_that_may_be_shown(config: Path) -> None:
    loaded = load(config, [], SECRETS)
    assert "s3cr3t" not in str(masked(loaded.settings)) + str(loaded.origins)
    assert masked(loaded.settings)["kafka"]["client"]["ssl_password"] == "***"
    assert sorted(secrets(loaded.settings)) == sorted(SECRETS.values())
    assert loaded.settings.kafka.sasl_password is not None
    assert loaded.settings.kafka.sasl_password.get_secret_value() == "s3cr3t-KAFKA"


def test_a_secret_is_hidden_in_any_text(config: Path) -> None:
    redact = Redactor()
    redact.add(secrets(load(config, [], SECRETS).settings))
    text = redact('login s3cr3t-KAFKA, json s3cr3t\\"S3, url s3cr3t%22S3, at http://ann:s3cr3t-x@h/')
    assert "s3cr3t" not in text and "http://***@h/" in text


@pytest.mark.parametrize("key", ["kafka.sasl_password", "s3.secret_key", 'kafka.client."ssl.key.password"'])
def test_secrets_come_from_the_environment_alone(config: Path, key: str) -> None:
    text = refusal(config, f"{key}=s3cr3t-KAFKA")
    assert "put it in the environment as OFFSETRL_" in text and "s3cr3t" not in text


@pytest.mark.parametrize(
    "override", ["s3.endpoint_url=http://ann:s3cr3t@store:9000", "kafka.bootstrap_servers=ann:s3cr3t@broker:9092"]
)
def test_addresses_hold_no_passwords_and_the_refusal_does_not_repeat_them(config: Path, override: str) -> None:
    text = refusal(config, override)
    assert "must not hold a user" in text or "without scheme, user or password" in text
    assert "s3cr3t" not in text


def test_a_password_file_is_read_and_counts_as_a_secret(config: Path) -> None:
    (config.parent / "pw").write_text("s3cr3t-FILE\n")
    assert secrets(load(config, ["kafka.sasl_password_file=pw"], {}).settings) == ["s3cr3t-FILE"]
    with pytest.raises(SettingError, match="cannot read"):
        secrets(load(config, ["kafka.sasl_password_file=absent"], {}).settings)


def digest(config: Path, *overrides: str, **environ: str) -> str:
    return config_digest(load(config, overrides, environ).settings, "main")


def test_the_digest_follows_what_shapes_results_and_nothing_else(config: Path) -> None:
    same = digest(config)
    assert digest(config, "policies.main.train.learning_rate=0") != same
    assert digest(config, "run.seed=1") != same
    assert digest(config, "policies.solver-2.train.steps=1") == same
    assert digest(config, "run.folder=elsewhere", "kafka.bootstrap_servers=a:1", **SECRETS) == same


def test_each_region_on_the_embedded_store_has_a_bucket_of_its_own(config: Path) -> None:
    settings = load(config, ["regions.west.bucket=mine-west"], {}).settings
    assert [settings.bucket(region).bucket for region in ("", "east", "west")] == [
        "offsetrl",
        "offsetrl-east",
        "mine-west",
    ]


def test_what_is_shown_as_toml_loads_to_the_same_settings(config: Path) -> None:
    from infra.cli.config_commands import toml

    loaded: Loaded = load(config, [], {})
    lines = [f"{dotted(key)} = {toml(shown(key, value))}" for key, value in flat(loaded.settings) if value is not None]
    again = config.parent / "again.toml"
    again.write_text("\n".join(lines))
    tomllib.loads(again.read_text())
    assert load(again, [], {}).settings.model_dump() == loaded.settings.model_dump()


def test_every_setting_of_ours_says_what_it_is() -> None:
    schema = Settings.model_json_schema()
    for name, table in schema["$defs"].items():
        assert table.get("description"), name
