"""Contains the LLM worker: the engine, the store of features, and the service around both.

    worker_service    connects everything below, and handles calls and messages
    open_calls        keeps the `generate` calls that are open, and sends their tokens to the routers
    worker_reports    builds the reports with the worker's gauges; `worker_config` has its settings
    engine_interface  defines what the service knows of an engine: its calls, and the updates that it reports
    engine            runs the thread that repeats plan -> execute -> commit; `own_engine` builds it on a device
    engine_thread     has what engines have in common: the thread, its commands, and snapshots under way
    vllm_engine       runs vLLM as the engine of a worker, in an environment of its own
    features          pulls features, holds them, and hands references to the engine
    scheduling        decides what to compute next, in which blocks and from which features
    compute           executes one step on the model, with paged attention
    sampling          draws tokens from the last hidden states of a step
    tensor_parallel   runs one worker on several ranks
    stages            runs the stages behind the thinker, which make speech of its text
    speech            contains the models of these stages

The deployment creates a `WorkerService` for each worker; routers reach it through calls and messages, and encoders
through messages. A worker knows nothing of HTTP, of prompts as text, and of how media become features.
"""
