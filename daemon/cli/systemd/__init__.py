"""`deepinfer systemd`: its commands."""

from __future__ import annotations

from cyclopts import App

from daemon.cli.systemd.install import install
from daemon.cli.systemd.uninstall import uninstall

systemd_app = App(name="systemd", help="Let systemd run the instances of this machine.")
systemd_app.command(install)
systemd_app.command(uninstall)
