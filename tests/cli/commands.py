"""Running the command as a user does."""

from click.testing import CliRunner

from envpipe_megatron.cli import main


def run(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def run_well(*words):
    result = run(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def run_badly(*words):
    """Run what must fail, and give its message with single spaces."""
    result = run(*words)
    assert result.exit_code not in (0, None)
    # An error that nobody caught would be here as itself, and a traceback for the user.
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    message = " ".join(result.stderr.split())
    assert "Error: " in message
    return message
