"""OpenAI's HTTP formats: requests in, responses, chunks and errors out. Knows nothing of how they are served."""
