"""EnvPipe's models and a Llama, complete with embedding and head, trained by one command."""
