"""Bugs to plant in the code that connects to other hosts."""

from autotuner.edge import ssh


def trust_any_host() -> None:
    """Whoever answers is taken for the host."""
    connect = ssh.asyncssh.connect
    ssh.asyncssh.connect = lambda *given, **named: connect(*given, **{**named, "known_hosts": None})


def f_string_command() -> None:
    """What is run on a host is put together as people do it who have not been bitten yet."""
    ssh.command_line = lambda argv, env=None: " ".join(argv)
