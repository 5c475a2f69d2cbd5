"""NeMo-Gym environments: any of its datasets and agents, driven over HTTP."""

from actors.environments.nemo_gym.producer import NemoGym

__all__ = ["NemoGym"]
