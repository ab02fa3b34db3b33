"""Clients that send requests and judge or time the answers."""
