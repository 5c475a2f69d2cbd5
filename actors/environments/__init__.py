"""Environments: what yields tasks and scores the policy's answers, and how a recipe's name becomes one."""
