// All kernels, as one module: what is compiled for a device, and by the tests for a CPU.
#pragma once
#include "attention.h"
#include "dispatch.h"
#include "embedding.h"
#include "exact.h"
#include "experts.h"
#include "loss.h"
#include "optimizer.h"
#include "products.h"
#include "router.h"
#include "rows.h"
#include "spans.h"
#include "transport.h"
