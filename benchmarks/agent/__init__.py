"""Conversations of agents, replayed with and without the prefix cache."""
