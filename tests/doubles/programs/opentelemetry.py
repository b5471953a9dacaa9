import time

from opentelemetry.sdk.trace import TracerProvider

tracer = TracerProvider().get_tracer("roll")
for _ in range(4):
    with tracer.start_as_current_span("pipeline_step_total"):
        with tracer.start_as_current_span("step_generate"):
            time.sleep(0.012)
        with tracer.start_as_current_span("GET"):  # of a library
            pass
        with tracer.start_as_current_span("step_train"):
            time.sleep(0.01)
