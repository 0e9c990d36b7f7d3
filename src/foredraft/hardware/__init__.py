"""Machines that predictions can be made for: figures of their makers, one YAML each."""
