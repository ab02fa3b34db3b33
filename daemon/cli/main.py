"""The entry point `deepinfer`: which commands there are, and how their errors end."""

from __future__ import annotations

import os
import sys

from cyclopts import App
from rich.text import Text

from daemon.cli.bench import bench_app
from daemon.cli.check import check_app
from daemon.cli.config_show import config_app
from daemon.cli.inspect import inspect_app
from daemon.cli.keys import keys_app
from daemon.cli.output import print_error, sentence_console
from daemon.cli.serve import serve
from daemon.cli.start import start
from daemon.cli.status import status
from daemon.cli.stop import stop
from daemon.cli.systemd import systemd_app
from daemon.cli.top import top
from daemon.configuration.sources import ENVIRONMENT_PREFIX, SOURCES
from daemon.errors import EXIT_USAGE, DeepInferError
from daemon.system.operator_text import require_utf8
from daemon.system.standard_output import open_missing_descriptors

app = App(
    name="deepinfer",
    help="Serve large language models over the OpenAI API.",
    config=SOURCES,
    help_on_error=False,
    error_formatter=lambda error: Text(f"deepinfer: {error}", style="red"),
)
app.command(serve)
app.command(start)
app.command(stop)
app.command(status)
app.command(inspect_app)
app.command(top)
app.command(keys_app)
app.command(check_app)
app.command(bench_app)
app.command(config_app)
app.command(systemd_app)


def main() -> None:
    open_missing_descriptors()
    errors = sentence_console(stderr=True)
    try:
        for word in sys.argv[1:]:
            require_utf8("The argument", word)
        for name, value in os.environ.items():
            if name.startswith(ENVIRONMENT_PREFIX):
                require_utf8(f"The environment variable {name}", value)
        app(sys.argv[1:], exit_on_error=False, print_error=True, error_console=errors)
    except DeepInferError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # cyclopts has printed its own errors; anything else is a defect and shows its traceback.
        if type(error).__module__.startswith("cyclopts"):
            sys.exit(EXIT_USAGE)
        raise


if __name__ == "__main__":
    main()
