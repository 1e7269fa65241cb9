// Placeholder.
#pragma once
#include "prefill.cuh"
