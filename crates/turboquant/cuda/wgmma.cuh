// Placeholder.
#pragma once
#include "gpu.cuh"
