"""EnvPipe's experiments (USENIX ATC'23, figures 9 to 13) through this project's own runtime."""
