"""Names of stages as every framework writes them, and the one that all of them mean."""

import re
from collections.abc import Collection

from lightning_rlprof.analysis.labels import Label, label_of

__all__ = ["canonical", "paired"]

_BY_LABEL: dict[int, str] = {
    Label.ROLLOUT: "actor_generate",
    Label.REWARD: "compute_reward",
    Label.SYNC: "weight_sync",
}
"""Labels that are one stage each; the others hold several."""

_ALIASES = {
    "actor_compute_log_prob": """
        actor_log_prob compute_actor_log_prob compute_log_prob compute_log_probs log_prob log_probs
        old_log_prob old_log_probs""",
    "actor_update": """
        actor_train policy_training ppo_update train_actor update_actor update_policy""",
    "reference_compute_log_prob": """
        compute_ref_log_prob compute_ref_log_probs compute_reference_log_prob ref ref_log_prob
        ref_log_probs reference_log_prob reference_log_probs""",
    "critic_compute_values": "compute_values critic_values values",
    "critic_update": "critic_train train_critic update_critic",
    "compute_advantage": "adv advantage advantages compute_advantages",
}
_STAGE_OF = {alias: stage for stage, names in _ALIASES.items() for alias in names.split()}
_SIGNS = re.compile(r"[^a-z0-9]+")


def canonical(name: str) -> str:
    """Return the stage of `lightning_rlprof.model.STAGES` that a name means, else the name.

    Capitals and signs do not count; of ``Class.method`` the method alone will do.

    Example::

        >>> canonical("ActorRolloutRefWorker.update_actor"), canonical("old_log_prob")
        ('actor_update', 'actor_compute_log_prob')
        >>> canonical("generate_sequences"), canonical("my_filter")
        ('actor_generate', 'my_filter')
    """
    whole = name.lower().partition("#")[0]
    for part in (whole, whole.rpartition(".")[2]):
        found = _STAGE_OF.get(_SIGNS.sub("_", part).strip("_"))
        if found is not None:
            return found
    return _BY_LABEL.get(label_of(name), name)


def paired(own: Collection[str], others: Collection[str]) -> dict[str, str]:
    """Return under which name each stage of a run is compared with another run's.

    A name that both runs have stays; any other becomes the stage that it means, so that several of
    one run may become one.

    Example::

        >>> paired(["gen", "update_actor", "env_step"], ["actor_generate", "env_step"])
        {'gen': 'actor_generate', 'update_actor': 'actor_update', 'env_step': 'env_step'}
    """
    both = set(own) & set(others)
    return {name: name if name in both else canonical(name) for name in own}
